"""Bodies of forms with a file, read in parts: the file goes where it is received, the fields are
few and small."""

from __future__ import annotations

from collections.abc import AsyncIterator

from anyio import to_thread
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from tuna.errors import BadInput
from tuna_serve.requests.uploads import Upload

_MAX_PARTS = 40
#: Bytes of all that is not the file.
_TEXT_BYTES = 256 << 10


class FormReader:
    """Reads one body of the type multipart/form-data; its file, `file`, goes into an upload."""

    def __init__(self, content_type: str, upload: Upload) -> None:
        """Raises BadInput for another type."""
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or b"boundary" not in options:
            raise BadInput("The body is not a form (multipart/form-data).")
        self.fields: dict[str, str] = {}
        self.filename, self._has_file = "", False
        self._upload = upload
        self._texts: dict[str, bytearray] = {}
        self._parts = self._text_bytes = 0
        self._header, self._value, self._disposition = bytearray(), bytearray(), b""
        self._name = ""  #: name of the part; empty for the file
        self._received: list[bytes] = []
        self._is_whole = False
        try:
            self._parser = MultipartParser(
                options[b"boundary"],
                {
                    "on_part_begin": self._begin,
                    "on_header_field": self._header_name,
                    "on_header_value": self._header_value,
                    "on_header_end": self._header_end,
                    "on_headers_finished": self._headers_end,
                    "on_part_data": self._data,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise BadInput(f"The boundary of the form is invalid: {error}") from None

    async def read(self, body: AsyncIterator[bytes]) -> None:
        """Read a body; raises BadInput for what is not a form, and what `Upload.write` raises."""
        try:
            async for chunk in body:
                self._parser.write(chunk)
                if self._received:
                    received, self._received = b"".join(self._received), []
                    await to_thread.run_sync(self._upload.write, received)
            self._parser.finalize()
        except FormParserError:
            self._is_whole = False
        if not self._is_whole:
            raise BadInput("The body is not a form, or is cut off.")
        self.fields = {name: text.decode(errors="replace") for name, text in self._texts.items()}

    def _begin(self) -> None:
        self._disposition = b""
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise BadInput(f"The form has more than {_MAX_PARTS} fields.")

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._bound(end - start)
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._bound(end - start)
        self._value += data[start:end]

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode(errors="replace")
        if b"filename" in options:
            if self._has_file or name != "file":
                raise BadInput("The form has one file, in the field `file`.")
            self.filename, self._has_file = options[b"filename"].decode(errors="replace"), True
            self._name = ""
        elif not name or name in self._texts:
            raise BadInput("The form has a field without a name, or one twice.")
        else:
            self._name = name
            self._texts[name] = bytearray()

    def _data(self, data: bytes, start: int, end: int) -> None:
        if not self._name:
            self._received.append(data[start:end])
        else:
            self._bound(end - start)
            self._texts[self._name] += data[start:end]

    def _end(self) -> None:
        self._is_whole = True

    def _bound(self, size_bytes: int) -> None:
        self._text_bytes += size_bytes
        if self._text_bytes > _TEXT_BYTES:
            raise BadInput(f"The fields of the form have more than {_TEXT_BYTES >> 10} KiB.")
