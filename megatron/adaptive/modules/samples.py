"""Reads samples (conversations or texts, with or without images) for fine-tuning.

::

    line of JSON ──image files──> conversation ──chat template, processor──> microbatch of a sample

Each line of the file is a JSON object with ``text``, or with ``messages`` for the model's chat
template. Images are opened from files, and nothing is downloaded. All lines are encoded once when
the file is read, so that an invalid line raises an error before training starts. The processes of a
job share this work: each line is encoded by one process, which sends the result to the others.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron.adaptive.config.input_files import open_file
from megatron.adaptive.errors import ConfigError
from megatron.adaptive.modules.batch import Microbatch
from megatron.adaptive.modules.processors import first_line
from megatron.adaptive.modules.processors import load_processor as load_processor

if TYPE_CHECKING:
    from megatron.adaptive.engine.process_context import Job

IGNORED = -100
"""Label of tokens that the loss ignores."""

# Names of the entries whose values determine the shapes of tensors: image sizes and token types.
_DECISIVE = re.compile(r"mm_token_type_ids|image_sizes|spatial_shapes|\w+_grid_(thw|hws?)")

# Attributes of processors and configurations that contain the text of a placeholder token. The same
# names with the suffix _id or _index refer to the token's ID.
_PLACEHOLDERS = ("image_token", "video_token", "audio_token")

# Keys of a message part under which common formats store the path of an image.
_NAMES = ("image", "path", "url", "image_url")

# Number of lines that each process encodes before the first exchange of results, and maximum of
# this number for later exchanges.
_FIRST_LINES, _MOST_LINES = 1, 1024

# Target and maximum size in bytes of all samples that the processes send in one exchange. The
# target may be exceeded if long samples follow short ones.
_EXCHANGED_BYTES, _MOST_EXCHANGED_BYTES = 1 << 25, 1 << 28


def num_learned(batch: Sequence[Microbatch]) -> list[float]:
    """Returns the number of tokens that the loss includes, for each microbatch of ``batch``.

    Pass the result to ``Pipeline.step`` as ``num_items``.
    """
    return [float((entries["labels"][:, 1:] != IGNORED).sum()) for entries in batch]


def placeholder_ids(*sources: Any) -> frozenset[int]:
    """Returns the IDs of the tokens that stand for parts of images, videos and audio.

    For example, an image occupies one such token per feature vector. The loss ignores these tokens.

    Args:
        sources: Processors, tokenizers or configurations of a model.
    """
    ids = set[int]()
    for source in sources:
        tokenizer = getattr(source, "tokenizer", source)
        for name in _PLACEHOLDERS:
            values = [getattr(source, f"{name}_{suffix}", None) for suffix in ("id", "index")]
            # Also read the list of image token IDs, because for Gemma 3, the attributes above
            # contain only the token that precedes an image.
            values += getattr(source, f"{name}_ids", None) or ()
            token = getattr(source, name, None)
            if token is not None and hasattr(tokenizer, "get_vocab"):
                values.append(tokenizer.get_vocab().get(str(token)))
            ids.update(value for value in values if isinstance(value, int))
    return frozenset(ids)


@dataclass(frozen=True, kw_only=True)
class SampleReader:
    """Encodes samples (lines of JSON) as microbatches.

    Attributes:
        processor: Processor or tokenizer of the model, from :func:`load_processor`.
        max_length: Maximum number of tokens per sample; longer samples are truncated.
        length_multiple: Padding unit. Each sample is padded to a multiple of this number of tokens,
            because a pipeline records the model once per length.
        image_folder: Folder that contains all images. Image paths are relative to this folder;
            ``None`` uses the folder of the sample file.
        kept_bytes: Maximum total size in bytes of samples kept in memory. Other samples are encoded
            again for each use.
        config: Configuration of the model, which may contain further image placeholder tokens;
            ``None`` uses only the tokens of the processor.
    """

    processor: Any
    max_length: int = 2048
    length_multiple: int = 64
    image_folder: Path | None = None
    kept_bytes: int = 1 << 30
    config: Any = None

    @cached_property
    def _placeholders(self) -> torch.Tensor:
        return torch.tensor(sorted(placeholder_ids(self.processor, self.config)), dtype=torch.long)

    def read(self, path: Path, job: Job | None = None) -> SampleFile:
        """Reads a file, and keeps the samples with at least one token that the loss includes.

        Args:
            path: Path of the file.
            job: Job whose processes share the work, and must all call this method; ``None`` if this
                process encodes all lines itself.

        Raises:
            ConfigError: If the file cannot be read, contains no such samples, contains an invalid
                line, or differs between processes. The message contains the number of the invalid
                line. All processes of the job raise the same error.
        """
        return SampleFile(path, self, job)

    def encode(self, sample: Any, image_folder: Path) -> dict[str, torch.Tensor]:
        """Encodes a sample as a microbatch.

        Args:
            sample: JSON object of a line, parsed.
            image_folder: Folder that contains all images.

        Raises:
            ConfigError: If the sample has no text, its images cannot be read, or the model or its
                chat template does not support images.
        """
        if not isinstance(sample, Mapping) or not ("messages" in sample or "text" in sample):
            raise ConfigError(
                'the line must be a JSON object with the key "text", or "messages" for a chat'
            )
        images, messages = _with_images(sample, image_folder, self.processor)
        if messages is not None:
            encoded = self._apply_template(messages, images)
        else:
            text = sample["text"]
            if not isinstance(text, str):
                raise ConfigError(f"text must be a string, got a {type(text).__name__}")
            self._check_places(text, images)
            options = {"images": images} if images else {}
            encoded = self.processor(text=text, return_tensors="pt", **options)
        return self._padded(encoded, has_images=bool(images))

    def _apply_template(self, messages: list[Any], images: list[Any]) -> Any:
        """Encodes the conversation ``messages`` with the chat template.

        ``images`` contains the images of the conversation.
        """
        processor = self.processor
        template = processor.chat_template
        if template is None:
            raise ConfigError(
                "the model's folder has no chat template; use text, or add chat_template.jinja"
            )
        self._check_places(processor.apply_chat_template(messages, tokenize=False), images)
        return processor.apply_chat_template(
            messages,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            return_assistant_tokens_mask=bool(re.search(r"{%-?\s*generation\b", str(template))),
        )

    def _check_places(self, prompt: str, images: list[Any]) -> None:
        """Checks that the text ``prompt`` contains one placeholder per image."""
        markers = [getattr(self.processor, name, None) for name in ("image_token", "boi_token")]
        counts = [prompt.count(marker) for marker in markers if isinstance(marker, str)]
        if counts and max(counts) != len(images):
            raise ConfigError(
                f"the line has {len(images)} images, but its text has {max(counts)} image "
                f"placeholders ({markers[0]}) after the chat template is applied; correct the "
                "line or the template"
            )

    def _padded(self, encoded: Mapping[str, Any], *, has_images: bool) -> dict[str, torch.Tensor]:
        """Adds labels to an encoded sample, and truncates and pads its entries.

        Only entries with one value per token are truncated and padded. If ``has_images`` is true,
        and truncation would remove tokens of an image, an error is raised.
        """
        entries = {name: torch.as_tensor(entry) for name, entry in encoded.items()}
        # No attention mask is needed, because padding follows the text, and tokens attend only to
        # earlier tokens.
        ids = entries["input_ids"]
        every_token = entries.pop("attention_mask", torch.ones_like(ids))
        learned = entries.pop("assistant_masks", every_token).reshape(1, -1)
        # If the template provides no mask, the loss includes all tokens except placeholders. Ignore
        # placeholders explicitly, because a template's mask may include them.
        is_ignored = (learned == 0) | torch.isin(ids, self._placeholders)
        entries["labels"] = ids.masked_fill(is_ignored, IGNORED)
        length = min(ids.shape[1], self.max_length)
        if has_images:
            self._check_cut(ids[:, length:])
        padding = (0, -length % self.length_multiple)
        for name, entry in entries.items():
            if entry.shape == ids.shape:
                value = IGNORED if name == "labels" else 0
                entries[name] = torch.nn.functional.pad(entry[:, :length], padding, value=value)
        return entries

    def _check_cut(self, removed: torch.Tensor) -> None:
        """Checks that no tokens of an image are among ``removed``, the truncated tokens."""
        placeholders = self._placeholders
        if removed.numel() and (
            not placeholders.numel() or torch.isin(removed, placeholders).any()
        ):
            raise ConfigError(
                f"truncating the sample to {self.max_length} tokens would remove "
                f"{removed.numel()} tokens, including tokens of an image; increase the maximum "
                "length, or use smaller images"
            )


@dataclass(frozen=True, kw_only=True)
class _Line:
    """Contains a line of the sample file and its number.

    Attributes:
        number: Line number in the file, starting at 1.
        text: Content of the line.
    """

    number: int
    text: str


@dataclass(frozen=True, kw_only=True)
class _Encoded:
    """Contains the result of encoding a line when the file is read.

    Attributes:
        error: Reason why the line is invalid; empty if it is valid.
        learned: Number of tokens that the loss includes.
        names: Names of the sample's entries.
        content: Hashes of the line and its images.
        num_bytes: Size of the sample in bytes.
        sample: Encoded line; ``None`` if memory or message size does not allow keeping it.
    """

    error: str = ""
    learned: int = 0
    names: frozenset[str] = frozenset()
    content: bytes = b""
    num_bytes: int = 0
    sample: Microbatch | None = None


class SampleFile:
    """Contains the samples of a file. Indexing returns a sample as a microbatch.

    Args:
        path: Path of a file with one JSON object per line.
        reader: Reader that encodes the lines.
        job: Job whose processes all read the file and share the work; ``None`` if this process does
            all the work.

    Attributes:
        num_learned: Number of tokens that the loss includes, for each sample.
        largest: Index of the sample with the most bytes.
        num_empty: Number of samples that were skipped because the loss would include none of their
            tokens.
        digest: Hash of all lines and images, in order.
    """

    def __init__(self, path: Path, reader: SampleReader, job: Job | None = None) -> None:
        self._path = path
        self._reader = reader
        self._image_folder = reader.image_folder or path.parent
        self._lines: list[_Line] = []
        self._kept: dict[int, Microbatch] = {}
        self._indices_of_kinds: dict[frozenset[str], int] = {}
        self._left_bytes = reader.kept_bytes
        self.num_empty = 0
        self.num_learned: list[int] = []
        self.largest = most_bytes = 0
        digest = hashlib.blake2b(digest_size=16)
        for line, encoded in self._first_pass(job):
            if encoded.error:
                raise ConfigError(encoded.error)
            digest.update(encoded.content)
            if not encoded.learned:
                self.num_empty += 1
                continue
            self.num_learned.append(encoded.learned)
            self._indices_of_kinds.setdefault(encoded.names, len(self._lines))
            if encoded.num_bytes > most_bytes:
                self.largest, most_bytes = len(self._lines), encoded.num_bytes
            if encoded.sample is not None:
                self._left_bytes -= encoded.num_bytes
                if self._left_bytes >= 0:
                    self._kept[len(self._lines)] = encoded.sample
            self._lines.append(line)
        self.digest = digest.hexdigest()
        if not self._lines:
            raise ConfigError(
                f"{path} has no samples with tokens to learn (skipped {self.num_empty} samples "
                "without such tokens); add samples, or increase the maximum length if it "
                "truncates all replies"
            )

    def _first_pass(self, job: Job | None) -> Iterator[tuple[_Line, _Encoded]]:
        """Yields all lines in order, each with the result of encoding it.

        The lines of a block are assigned to the processes round-robin. After each block, the
        processes exchange their results.
        """
        if job is None:
            for line in _lines_of(self._path):
                yield line, self._examined(line)
            return
        lines = _common_lines(self._path, job)
        ranks = job.environment.world_size
        size, start = _FIRST_LINES, 0
        while start < len(lines):
            block = lines[start : start + size * ranks]
            start += len(block)
            of_rank = job.gather(self._part(block[job.rank :: ranks], ranks))
            for index, line in enumerate(block):
                yield line, of_rank[index % ranks][index // ranks]
            # gather() allocates the same amount of memory for each process, as much as the largest
            # contribution needs.
            sent_bytes = ranks * max(map(_size_of_samples, of_rank))
            size = _next_size(size, sent_bytes)

    def _part(self, lines: Sequence[_Line], ranks: int) -> list[_Encoded]:
        """Encodes ``lines`` on this process, and drops samples if their total size is too large.

        The size limit of an exchange is divided equally among the ``ranks`` processes.
        """
        part: list[_Encoded] = []
        room = _MOST_EXCHANGED_BYTES // ranks
        for line in lines:
            encoded = self._examined(line)
            if encoded.sample is not None:
                room -= encoded.num_bytes
            part.append(encoded if room >= 0 else replace(encoded, sample=None))
        return part

    def _examined(self, line: _Line) -> _Encoded:
        """Encodes a line, and drops the encoded sample if the limit ``kept_bytes`` is reached."""
        try:
            sample = self._encode(line)
            content = _content(line, self._image_folder)
        except ConfigError as error:
            return _Encoded(error=str(error))
        return _Encoded(
            learned=int(num_learned([sample])[0]),
            names=frozenset(sample),
            content=content,
            num_bytes=sum(entry.nbytes for entry in sample.values()),
            sample=sample if self._left_bytes >= 0 else None,
        )

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Microbatch:
        kept = self._kept.get(index)
        return self._encode(self._lines[index]) if kept is None else kept

    def __iter__(self) -> Iterator[Microbatch]:
        return (self[index] for index in range(len(self)))

    @property
    def kinds(self) -> list[Microbatch]:
        """Returns one sample for each set of entry names, such as with and without image entries.

        These samples can serve as the sample batch of a pipeline.
        """
        return [self[index] for index in self._indices_of_kinds.values()]

    @property
    def decisive_entries(self) -> list[str]:
        """Returns the names of the entries whose values determine the model's operations."""
        names = frozenset[str]().union(*self._indices_of_kinds)
        return sorted(name for name in names if _DECISIVE.fullmatch(name))

    def _encode(self, line: _Line) -> Microbatch:
        """Encodes ``line`` as a microbatch.

        Raises:
            ConfigError: If the line is invalid.
        """
        from jinja2 import TemplateError

        try:
            return self._reader.encode(json.loads(line.text), self._image_folder)
        except ConfigError as error:
            reason = str(error)
        except (
            AttributeError,
            LookupError,
            RecursionError,
            TemplateError,
            TypeError,
            ValueError,
        ) as error:
            reason = f"the line cannot be encoded ({type(error).__name__}: {first_line(error)})"
        raise ConfigError(f"{self._path}:{line.number}: {reason}")


def _next_size(size: int, sent_bytes: int) -> int:
    """Returns the number of lines that each process encodes before the next exchange.

    Args:
        size: Number of lines that each process encoded before the last exchange.
        sent_bytes: Memory in bytes that the last exchange needed for samples.
    """
    fitting = size * _EXCHANGED_BYTES // max(1, sent_bytes)
    return max(1, min(2 * size, fitting, _MOST_LINES))


def _size_of_samples(part: Sequence[_Encoded]) -> int:
    """Returns the total size in bytes of the samples in ``part``, the results of one process."""
    return sum(each.num_bytes for each in part if each.sample is not None)


def _common_lines(path: Path, job: Job) -> list[_Line]:
    """Reads the file ``path`` on all processes of a job, and returns its lines.

    All processes must call this.

    Raises:
        ConfigError: If any process cannot read the file, or the file differs between processes. The
            error is raised on all processes.
    """
    lines: list[_Line] = []
    error = ""
    try:
        lines = list(_lines_of(path))
    except ConfigError as wrong:
        error = str(wrong)
    digest = hashlib.blake2b()
    for line in lines:
        digest.update(f"{line.number} {len(line.text)} {line.text}".encode())
    of_rank = job.gather((error, digest.digest()))
    for rank, (wrong_there, there) in enumerate(of_rank):
        if wrong_there:
            is_everywhere = all(other for other, _ in of_rank)
            raise ConfigError(wrong_there if is_everywhere else f"rank {rank}: {wrong_there}")
        if there != of_rank[0][1]:
            raise ConfigError(
                f"{path} differs between rank {rank} and rank 0; give all processes the same file"
            )
    return lines


def _content(line: _Line, folder: Path) -> bytes:
    """Returns the hash of the text of ``line``, followed by the hashes of its image files.

    Args:
        line: Line of the file.
        folder: Folder that contains all images.
    """
    hashes = [hashlib.blake2b(line.text.strip().encode()).digest()]
    sample = json.loads(line.text)
    names = list(sample.get("images") or [])
    for message in sample.get("messages") or []:
        content = message.get("content")
        for part in content if isinstance(content, list) else []:
            if part["type"] != "text":
                names += [part[key] for key in _NAMES if key in part][:1]
    for name in names:
        content = Path(_path_of_image(name, folder)).read_bytes()
        hashes.append(hashlib.blake2b(content).digest())
    return b"".join(hashes)


def _with_images(
    sample: Mapping[str, Any], folder: Path, processor: Any
) -> tuple[list[Any], list[Any] | None]:
    """Opens the images of a sample, and inserts them into its messages.

    The ``content`` of a message is a string or a list of parts. A part ``{"type": "image", "path":
    FILE}`` refers to an image file, and ``{"type": "image"}`` refers to the next image in the
    sample's ``images``.

    Args:
        sample: JSON object of a line, parsed, with ``messages`` or ``text``, and optionally
            ``images``.
        folder: Folder that contains all images.
        processor: Processor of the model, or its tokenizer if the model accepts only text.

    Returns:
        All images in order, and the messages with the images in their parts. The messages are
            ``None`` if the sample has ``text`` instead.

    Raises:
        ConfigError: If an image cannot be read, the messages are malformed, or the model does not
            support images.
    """
    names = sample.get("images") or []
    if not isinstance(names, list):
        raise ConfigError('images must be a list, such as "images": ["FILE", ...]')
    takes_images = getattr(processor, "image_processor", None) is not None
    if names and not takes_images:
        raise _no_images()
    listed = [_open_image(name, folder) for name in names]
    if "messages" not in sample:
        return listed, None
    messages = sample["messages"]
    if not (isinstance(messages, list) and all(map(_has_role, messages))):
        raise ConfigError('messages must be a list of objects like {"role": ..., "content": ...}')
    images: list[Any] = []
    waiting = iter(listed)
    filled: list[Any] = []
    for message in messages:
        content = message.get("content")
        if content is None or (isinstance(content, str) and not takes_images):
            filled.append(dict(message))
            continue
        parts = _parts(content)
        for part in parts:
            if part["type"] == "text":
                continue
            if not takes_images:
                raise _no_images()
            name = next((part.pop(key) for key in _NAMES if key in part), None)
            image = next(waiting, None) if name is None else _open_image(name, folder)
            if image is None:
                raise ConfigError(
                    f"images lists {len(listed)} images, but the messages have more image parts "
                    "without a path; add a path to each image part, or list more images"
                )
            part.update(type="image", image=image)
            images.append(image)
        # Chat templates of text-only models expect a string.
        content = parts if takes_images else "".join(part["text"] for part in parts)
        filled.append({**message, "content": content})
    unused = sum(1 for _ in waiting)
    if unused:
        raise ConfigError(
            f"{unused} of the {len(listed)} listed images are not used in the messages; add a part "
            '{"type": "image"} where each image belongs'
        )
    return images, filled


def _has_role(message: Any) -> bool:
    """Returns whether ``message`` is an object whose ``role`` is a string."""
    return isinstance(message, Mapping) and isinstance(message.get("role"), str)


def _no_images() -> ConfigError:
    return ConfigError(
        "the line has images, but the model's folder has no image processor; remove the images, "
        "or use a model that supports images"
    )


def _parts(content: Any) -> list[dict[str, Any]]:
    """Returns the ``content`` of a message as a list of text and image parts."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise ConfigError("the content of a message must be a string or a list of parts")
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        is_text = kind == "text" and isinstance(part.get("text"), str)
        if not (is_text or kind in ("image", "image_url")):
            raise ConfigError(
                f"a part of a message is {str(part)[:80]!r}; it must be "
                '{"type": "text", "text": ...} or {"type": "image", "path": ...}'
            )
        parts.append(dict(part))
    return parts


def _open_image(name: Any, folder: Path) -> Any:
    """Reads an image file, and returns the image in RGB.

    Args:
        name: Path of the image, relative to the folder or absolute; or an object that contains this
            path as ``url``.
        folder: Folder that must contain the image.

    Raises:
        ConfigError: If the path is outside of the folder, or the file is missing or damaged.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    path = _path_of_image(name, folder)
    try:
        with Image.open(path) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except UnidentifiedImageError:
        raise ConfigError(
            f"image {path} has a format that Pillow does not support; convert it"
        ) from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"image {path} is damaged ({reason}); replace it") from None


def _path_of_image(name: Any, folder: Path) -> str:
    """Returns the path of an image file, with symbolic links resolved.

    Args:
        name: Path of the image, relative to the folder or absolute; or an object that contains this
            path as ``url``.
        folder: Folder that must contain the image.

    Raises:
        ConfigError: If the path is outside of the folder, or the file does not exist.
    """
    if isinstance(name, Mapping):
        name = name.get("url")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"images must be given as file paths, got {str(name)[:80]!r}")
    if name.startswith("data:") or "://" in name:
        raise ConfigError(
            f"image {name[:80]} is a URL, but images are not downloaded; save the image, and use "
            "the path of the file"
        )
    # Resolve symbolic links, because a link may point to a private file outside of the folder.
    root = os.path.realpath(folder)
    path = os.path.realpath(os.path.join(os.path.abspath(folder), name))
    if os.path.commonpath([root, path]) != root:
        raise ConfigError(
            f"image {name} is outside of the image folder {root}; move the image there, or choose "
            "another image folder"
        )
    if not os.path.isfile(path):
        problem = "is not a file" if os.path.exists(path) else "does not exist"
        raise ConfigError(f"image {path} {problem}; correct the path")
    return path


def _lines_of(path: Path) -> Iterator[_Line]:
    """Yields the non-empty lines of the file ``path``.

    Raises:
        ConfigError: If the file cannot be read, or a line is not UTF-8 text.
    """
    try:
        with open_file(path) as file:
            for number, data in enumerate(file, start=1):
                text = data.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield _Line(number=number, text=text)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}:{number}: byte {error.start} is not valid UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; pass a file in JSON Lines format") from None
