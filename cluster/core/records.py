"""`dataclass` for records that are made thousands of times a second.

To type checkers it is the standard library's. At run time `frozen` is theirs alone to enforce: the library's way, a
call of `object.__setattr__` for each field, makes a record of 16 fields in 4 us instead of 0.9, and a request needs 25
records. Records with `frozen` are hashed by their fields, as the library's are.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(cls: type | None = None, /, *, frozen: bool = False, **options: Any) -> Any:
        def made(cls: type) -> type:
            return dataclasses.dataclass(unsafe_hash=frozen, **options)(cls)

        return made if cls is None else made(cls)
