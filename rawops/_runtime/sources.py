"""Find the CUDA sources, follow their includes, hash what a kernel is made of."""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)


@functools.cache
def cuda_src() -> Path:
    """Return the folder of the library's ``.cu`` files: inside an installed wheel, beside an editable checkout."""
    for folder in (_PACKAGE / "cuda_src", _PACKAGE.parent / "cuda_src"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"rawops: cuda_src not found beside {_PACKAGE}; reinstall the package")


@dataclass(frozen=True)
class Source:
    """A CUDA source: a file, or text with a name that stands in for one.

    Attributes
    ----------
    path : str
        Path of the file, or the name shown in errors for text.
    text : str or None
        The source itself when it is not a file.
    """

    path: str
    text: str | None = None

    def read(self) -> str:
        """Return the source text as it is now."""
        return self.text if self.text is not None else Path(self.path).read_text(encoding="utf-8")

    def closure(self) -> dict[str, str]:
        """Return the text of the source and of every file it includes with quotes, by the name that asked for it.

        NVRTC is given exactly these texts under these names, so what is hashed is what is compiled and no path of
        the machine enters a kernel. Conditional includes count whether taken or not; a file that does not exist is
        left for the compiler to complain about. Two different files under one name raise ValueError.
        """
        texts: dict[str, str] = {}
        files: dict[str, Path] = {}
        pending = [(Path(self.path).name, Path(self.path), self.read())]
        while pending:
            name, path, text = pending.pop()
            if name in texts:
                if files[name] != path:
                    raise ValueError(f'Kernel: #include "{name}" means both {files[name]} and {path}; rename one')
                continue
            texts[name], files[name] = text, path
            folders = (path.parent, cuda_src()) if self.text is None else (cuda_src(),)
            for included in _INCLUDE.findall(text):
                found = next((f / included for f in folders if (f / included).is_file()), None)
                if found:
                    found = found.resolve()
                    pending.append((included, found, found.read_text(encoding="utf-8")))
        return texts


def digest(texts: dict[str, str]) -> str:
    """Return a hash of a `Source.closure`."""
    hasher = hashlib.sha256()
    for name, text in sorted(texts.items()):
        content = text.encode()
        hasher.update(f"{name}\0{len(content)}\0".encode())
        hasher.update(content)
    return hasher.hexdigest()


def library_source(name: str) -> Source:
    """Return one of the library's own ``.cu`` files."""
    return Source(str(cuda_src() / name))


def user_source(path_or_text) -> Source:
    """Return a user's source: a path to a file, or CUDA text (anything with a newline or a brace in it)."""
    text = str(path_or_text)
    if not isinstance(path_or_text, Path) and ("\n" in text or "{" in text):
        return Source("source.cu", text)
    path = Path(text).expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError(f"Kernel: source must be an existing file or CUDA text, got {text!r}")
    return Source(str(path))
