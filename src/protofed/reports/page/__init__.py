"""The report as one HTML page that opens without a network, and the same page live."""
