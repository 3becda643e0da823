"""Find the CUDA sources, follow their includes, hash what a kernel is made of."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_PACKAGE = Path(__file__).resolve().parent.parent
_INCLUDE = re.compile(r'^([ \t]*#[ \t]*include[ \t]*)(?:"([^"\n]+)"|<([^>\n]+)>)', re.MULTILINE)
_ANY_INCLUDE = re.compile(r"^[ \t]*(?:#|%:)[ \t]*include\b(.*)|\b__has_include[ \t]*\(([^)\n]*)\)", re.MULTILINE)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_INCLUDING_OPTIONS = ("-include", "--pre-include")


@functools.cache
def cuda_src() -> Path:
    """Return the folder of the library's ``.cu`` files: inside an installed wheel, beside an editable checkout."""
    for folder in (_PACKAGE / "cuda_src", _PACKAGE.parent / "cuda_src"):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"rawops: cuda_src not found beside {_PACKAGE}; reinstall the package")


class File(NamedTuple):
    """One file of a closure: where it is, and the text that the compiler gets."""

    path: Path
    text: str


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

    @property
    def name(self) -> str:
        """Return the name that the compiler knows the source by."""
        return Path(self.path).name.replace('"', "'")

    def closure(self, options: tuple[str, ...] = ()) -> dict[str, File]:
        """Return the source and every file that it includes, by the name that the compiler is to know each by.

        NVRTC is given exactly these texts under these names, so what is hashed is what is compiled and no path of
        the machine enters a cache key. A header is searched for beside the file that asks for it (with quotes), in
        the ``-I`` folders of `options`, among the library's sources and (with quotes) in the working directory. It
        has one name however it was asked for, so that ``#pragma once`` holds. Conditional includes count whether taken
        or not; a file that does not exist is left for the compiler to complain about, and the CUDA headers are left to
        it too.
        """
        home = None if self.text is not None else Path(self.path).parent
        searched = [*_include_folders(options), cuda_src()]
        here = [] if _is_own(Path(self.path)) else _working_folder()
        roots = [*([home] if home else []), *searched, *here]
        files: dict[str, File] = {}

        def add(name: str, path: Path, text: str) -> None:
            files[name] = File(path, text)  # before its includes, which may lead back here
            beside = [path.parent] if home or name != self.name else []

            def rename(match: re.Match) -> str:
                directive, quoted, angled = match.groups()
                found = _find(quoted or angled, [*beside, *searched, *here] if quoted else searched)
                if found is None:
                    return match.group()
                known = self.name if str(found) == self.path else _name_in(roots, found)
                if known not in files:
                    add(known, found, _read(found))
                elif files[known].path != found:
                    raise ValueError(f'"{known}" means both {files[known].path} and {found}; rename one')
                return f'{directive}"{known}"'

            files[name] = File(path, sys.intern(_INCLUDE.sub(rename, text)))  # many kernels keep the same text

        add(self.name, Path(self.path), self.text if self.text is not None else _read(Path(self.path)))
        return files


def digest(files: dict[str, File], options: tuple[str, ...] = ()) -> str:
    """Return a hash of a `Source.closure`, "" where the compiler may read files that it does not have."""
    if any(option.startswith(_INCLUDING_OPTIONS) for option in options):
        return ""
    if any(_hides_includes(file.text) for file in files.values() if not _is_own(file.path)):
        return ""
    hasher = hashlib.sha256()
    for name, file in sorted(files.items()):
        for part in (encode(name), encode(file.text)):
            hasher.update(b"%d\0" % len(part) + part)
    return hasher.hexdigest()


def _is_own(path: Path) -> bool:
    return path.is_relative_to(cuda_src())


def _hides_includes(text: str) -> bool:
    """Tell whether a closure does not follow an include: by a macro, behind a comment, over two lines."""
    known = {quoted or angled for _, quoted, angled in _INCLUDE.findall(text)}
    plain = _COMMENT.sub(" ", text.replace("\r\n", "\n").replace("\\\n", ""))
    return any((directive or asked).strip()[1:-1] not in known for directive, asked in _ANY_INCLUDE.findall(plain))


def encode(text: str) -> bytes:
    """Return text as it was on disk: what is not UTF-8 went through Python as surrogates."""
    return text.encode(errors="surrogateescape")


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8-sig", errors="surrogateescape")


def _working_folder() -> list[Path]:
    """Return where NVRTC looks too, if it still exists."""
    try:
        return [Path.cwd()]
    except OSError:
        return []


def _include_folders(options: tuple[str, ...]) -> list[Path]:
    joined = re.findall(r"(?:^|\n)(?:-I|--include-path)[\s=]*(.+)", "\n".join(options))
    return [Path(os.path.abspath(folder)) for folder in joined]


def _find(name: str, folders: list[Path]) -> Path | None:
    name = os.fsdecode(encode(name))  # file names are bytes, whatever the locale makes of them
    paths = (Path(os.path.abspath(folder / name)) for folder in folders)
    return next((path for path in paths if path.is_file()), None)


def _name_in(roots: list[Path], path: Path) -> str:
    """Return a name for a header that does not depend on where things are installed."""
    for root in roots:
        if path.is_relative_to(root):
            return path.relative_to(root).as_posix()
    return path.name


def library_source(name: str) -> Source:
    """Return one of the library's own ``.cu`` files."""
    return Source(str(cuda_src() / name))


def user_source(path_or_text) -> Source:
    """Return a user's source: the path of a file, or CUDA text, which has a newline, a brace or ``__global__``."""
    if not isinstance(path_or_text, (str, os.PathLike)):
        raise TypeError(f"Kernel: source must be a path or CUDA text, got {path_or_text!r}")
    text = os.fsdecode(path_or_text)
    path = os.path.expanduser(text)
    if os.path.isfile(path):
        return Source(os.path.abspath(path))
    if isinstance(path_or_text, str) and re.search(r"[\n{]|__global__", text):
        return Source("source.cu", text)
    raise FileNotFoundError(f"Kernel: source must be an existing file or CUDA text, got {text!r}")
