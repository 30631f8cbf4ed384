"""What several methods are made of. A method imports from here and from `families`, never from another method."""
