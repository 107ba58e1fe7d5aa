"""Process groups: their backend, their deadlines, and where ranks meet (MegaScale 3.5)."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, model_validator

from megascale.config.base import Section

_REDIS = re.compile(
    r"rediss?://([^@/\s]*@)?([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?(/\d{0,4})?"
)


class CommConfig(Section):
    """Process groups."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    init_timeout_s: float = Field(300.0, gt=0.0)
    timeout_s: float = Field(600.0, gt=0.0, description="deadline of a collective")
    init_store: Literal["tcp", "redis"] = Field(
        "tcp", description="where ranks meet: torch's TCPStore in rank 0, or a Redis server"
    )
    redis_address: str = Field(
        "",
        description="with init_store = redis: redis://[USER:PASSWORD@]HOST:PORT/DATABASE, or "
        "rediss:// for TLS; somebody else starts the server, and runs may share it",
    )

    @model_validator(mode="after")
    def _store_and_address(self) -> CommConfig:
        if self.init_store == "redis" and not self.redis_address:
            raise ValueError(
                "comm.init_store is redis without comm.redis_address; name the server there: "
                "redis://HOST:PORT/DATABASE"
            )
        if self.redis_address and self.init_store != "redis":
            raise ValueError(
                f"comm.redis_address is {self.redis_server!r} with comm.init_store "
                f"{self.init_store}; set comm.init_store to redis, or leave the address out"
            )
        if self.redis_address and not _REDIS.fullmatch(self.redis_address):
            raise ValueError(
                f"comm.redis_address is {self.redis_server!r}; legal: redis://HOST:PORT/DATABASE "
                "(rediss:// for TLS), such as redis://10.0.0.1:6379/0"
            )
        return self

    @property
    def redis_server(self) -> str:
        """The address without a password."""
        return without_password(self.redis_address)


def without_password(address: str) -> str:
    """As it may be told."""
    return re.sub(r"//[^@/]*@", "//", address)
