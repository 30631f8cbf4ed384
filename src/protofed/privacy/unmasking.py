"""The server's half of a secure sum: it takes away what is left of the masks, and sees nothing but the sum."""

from collections.abc import Mapping, Sequence

from protofed.api.task import ClientId
from protofed.errors import RoundAbandoned
from protofed.privacy import masks
from protofed.privacy.masks import Words
from protofed.privacy.site import Roster, pair_mask, self_mask


def unmasked(
    masked_sum: Words,
    survivors: Sequence[ClientId],
    dropped: Sequence[ClientId],
    shares: Mapping[ClientId, Mapping[ClientId, bytes]],
    roster: Roster,
    binding: bytes,
    needed: int,
) -> Words:
    """The sum of what the survivors added, modulo 2⁶⁴, from the sum of what they sent. `shares` has what each site that
    stayed to the end gave of each other one: a share of a survivor's own mask, or of the key of one that dropped out
    after it had shared its secrets."""
    if len(shares) < needed:
        raise RoundAbandoned(f"{len(shares)} sites gave shares, and {needed} are needed to take the masks away")
    place = {client: k + 1 for k, client in enumerate(roster.ids)}
    holders = sorted(shares)[:needed]
    weights = masks.at_zero([place[holder] for holder in holders])

    def secret(client: ClientId) -> bytes:
        return masks.weighed(weights, [shares[holder][client] for holder in holders])

    total, count = masked_sum, len(masked_sum)
    for client in survivors:
        total = total - self_mask(secret(client), binding, client, count)
    for client in dropped:
        private = secret(client)
        if masks.public_key(private) != roster.adverts[client].masking:
            raise RoundAbandoned(f"the shares of the key of {client} are not what they should be")
        for survivor in survivors:
            mask = pair_mask(private, roster.adverts[survivor].masking, binding, (client, survivor), count)
            total = total - mask if survivor < client else total + mask  # guard: sums-masks-of-dropped
    return total
