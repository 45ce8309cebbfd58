"""Ed25519 keys of artifacts: holders of the private key sign, all others only verify."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

#: Prefixes of signed messages, which tell the signatures of artifacts, cache entries and cache
#: packs apart
_MESSAGE, CACHE, PACK = b"tuna artifact\0", b"tuna cache\0", b"tuna pack\0"
_SEED = b"tuna ed25519\0"


@dataclass(frozen=True)
class Keys:
    """Public keys that verify artifacts, and the current one's secret if this process signs."""

    #: public keys in hex, the current one first, then former ones that are still accepted
    public: tuple[str, ...]
    #: hex secret from which the seed of the current key is derived
    secret: str = field(default="", repr=False)

    @classmethod
    def of_secret(cls, secret: str, former: Iterable[str] = ()) -> Keys:
        """The keys of a signer; `former`: public keys (hex) that it still accepts."""
        return cls((_private_key(secret).public_key().public_bytes_raw().hex(), *former), secret)

    @classmethod
    def from_json(cls, text: str | bytes) -> Keys:
        """Parse what `to_json` wrote; raises ValueError for anything else."""
        found = json.loads(text)
        if not isinstance(found, dict) or found.keys() != {"public", "secret"}:
            raise ValueError("the keys of artifacts are not an object with public and secret")
        public, secret = found["public"], found["secret"]
        if (
            not isinstance(public, list)
            or not public
            or not all(isinstance(key, str) for key in (*public, secret))
        ):
            raise ValueError("the keys of artifacts are not texts")
        if any(len(bytes.fromhex(key)) != 32 for key in public):
            raise ValueError("a public key of artifacts does not have 32 bytes")
        bytes.fromhex(secret)
        return cls(tuple(public), secret)

    def to_json(self) -> str:
        """As text, the secret included."""
        return json.dumps({"public": self.public, "secret": self.secret})

    @property
    def signs(self) -> bool:
        """Whether these keys can sign."""
        return bool(self.secret)

    @cached_property
    def ids(self) -> tuple[str, ...]:
        """The id of each public key, the current one first."""
        return tuple(map(key_id, self.public))

    def sign(self, text: str, prefix: bytes = _MESSAGE) -> bytes:
        """Sign an artifact's SHA-256 (hex), or what else the store says of it, with the current
        key: 64 bytes. `prefix`: says what the text is.

        Raises ValueError without a secret.
        """
        if not self.secret:
            raise ValueError("these keys only verify")
        return self._private.sign(prefix + text.encode())

    def is_valid(
        self, signature: bytes, text: str, signed_with: str, prefix: bytes = _MESSAGE
    ) -> bool:
        """Whether it is the signature of the text by the accepted key with this id."""
        from cryptography.exceptions import InvalidSignature

        try:
            self._verifiers[signed_with].verify(signature, prefix + text.encode())
        except (InvalidSignature, KeyError):
            return False
        return True

    @cached_property
    def _private(self) -> Ed25519PrivateKey:
        return _private_key(self.secret)

    @cached_property
    def _verifiers(self) -> dict[str, Ed25519PublicKey]:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        return {
            key_id(key): Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
            for key in self.public
        }


def key_id(public: str) -> str:
    """The id of a public key (hex): the first 8 hex digits of its SHA-256."""
    return hashlib.sha256(bytes.fromhex(public)).hexdigest()[:8]


def _private_key(secret: str) -> Ed25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(
        hashlib.sha256(_SEED + bytes.fromhex(secret)).digest()
    )
