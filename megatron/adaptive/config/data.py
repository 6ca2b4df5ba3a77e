"""Defines the settings for the tokenizer, the training data and the batch sizes."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.adaptive.config.flags import (
    Count,
    File,
    Folder,
    Natural,
    Samples,
    assign,
    flag,
    required,
    switch,
)

_DEFAULT_SPLIT = "969,30,1"
_NOT_GPT = "it does not belong to GPT pre-training; use GPT2BPETokenizer"


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Tokenizer."""

    tokenizer_type: str = flag(
        "Type of the tokenizer; NullTokenizer reads token IDs and requires --vocab-size.",
        "GPT2BPETokenizer",
        choices=(
            "GPT2BPETokenizer",
            "HuggingFaceTokenizer",
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "Llama2Tokenizer",
            "TikTokenizer",
            "NullTokenizer",
        ),
        refused_choices={
            "BertWordPieceLowerCase": _NOT_GPT,
            "BertWordPieceCase": _NOT_GPT,
            "MultimodalTokenizer": _NOT_GPT,
            "NullMultimodalTokenizer": _NOT_GPT,
            "SFTTokenizer": "--sft works with any tokenizer, and uses the template in the "
            "tokenizer's folder; use HuggingFaceTokenizer",
        },
        derived="GPT2BPETokenizer; NullTokenizer with --mock-data and --vocab-size but no "
        "vocabulary files",
    )
    tokenizer_model: str | None = flag(
        "Folder with tokenizer.json for HuggingFaceTokenizer, or the model file of a "
        "SentencePiece tokenizer or of TikTokenizer.",
        unit="PATH",
    )
    vocab_size: Count | None = flag(
        "Number of token IDs before padding, for NullTokenizer and TikTokenizer; for other "
        "tokenizers, the minimum number of rows of the embedding.",
        unit="IDS",
    )
    vocab_file: File | None = flag("Vocabulary file of GPT2BPETokenizer (JSON).")
    merge_file: File | None = flag("Merges file of GPT2BPETokenizer.")
    tiktoken_pattern: str = flag(
        "Pattern that TikTokenizer uses to split text into words.", "v2", choices=("v1", "v2")
    )
    tiktoken_num_special_tokens: Count = flag(
        "Number of IDs that TikTokenizer reserves for special tokens.", 1000, unit="IDS"
    )
    tiktoken_special_tokens: tuple[str, ...] | None = flag(
        "Special tokens of TikTokenizer in the order of their IDs, which start at 0.",
        names=("--tiktoken-special-tokens", "--tokenizer-special-tokens"),
        unit="TOKEN",
        derived="those of megatron-core",
    )

    @property
    def missing(self) -> list[str]:
        """Names of the absent flags that this type of tokenizer requires."""
        needs = {
            "NullTokenizer": ("vocab_size",),
            "GPT2BPETokenizer": ("vocab_file", "merge_file"),
        }.get(self.tokenizer_type, ("tokenizer_model",))
        return [f"--{name.replace('_', '-')}" for name in needs if not getattr(self, name)]


@dataclass(frozen=True, kw_only=True)
class DataConfig(TokenizerConfig):
    """Data.

    A list of datasets consists of one path prefix, of several prefixes, or of alternating weights
    and prefixes. With ``--data-args-path``, the parser sets ``data_path`` to the datasets in that
    file. If training, validation and test share the same data, ``split`` is always set.
    """

    data_path: tuple[str, ...] | None = flag(
        "Prefixes of .bin and .idx files, each with an optional weight; --split divides the data.",
        unit="[WEIGHT] PREFIX",
    )
    data_args_path: File | None = flag("Text file that contains the value of --data-path.")
    split: str | None = flag(
        "Relative sizes of the training, validation and test data.",
        unit="SHARES",
        derived="969,30,1 with --data-path and --mock-data",
    )
    train_data_path: tuple[str, ...] | None = flag(
        "Datasets for training only, instead of --data-path.", unit="[WEIGHT] PREFIX"
    )
    valid_data_path: tuple[str, ...] | None = flag(
        "Datasets for validation only.", unit="[WEIGHT] PREFIX"
    )
    test_data_path: tuple[str, ...] | None = flag(
        "Datasets for testing only.", unit="[WEIGHT] PREFIX"
    )
    data_cache_path: Folder | None = flag(
        "Folder for the index files that are built from the data.", derived="next to the data"
    )
    mock_data: bool = switch("Use generated samples instead of data files.")
    mmap_bin_files: bool = switch(
        "Read .bin files instead of mapping them into memory.", off="--no-mmap-bin-files"
    )
    variable_seq_lengths: bool = switch(
        "Use each document as a sample, truncated to --seq-length and never joined with other "
        "documents; the loss is the mean over all tokens of the batch."
    )
    pack_to: Count | None = flag(
        "With --variable-seq-lengths: pack documents into microbatches of at most this number "
        "of tokens; attention stays within a document. Without this flag, every microbatch is "
        "padded to the length of its longest document, rounded up so that sequence- and "
        "context-parallel ranks get equal shares.",
        unit="TOKENS",
    )
    sft: bool = switch(
        "With --variable-seq-lengths: data files contain conversations as JSON lines; only the "
        "assistant's replies contribute to the loss."
    )
    num_workers: Natural | None = flag(
        "Number of data loading processes on each rank that needs data; on a CPU, they compete "
        "with the rank for its cores.",
        unit="PROCESSES",
        derived="2 on a GPU, 0 on a CPU",
    )
    dataloader_type: str = flag(
        "No effect: samples are always read in the dataset's shuffled order.",
        "single",
        choices=("single",),
        refused_choices={
            "cyclic": "single already shuffles and repeats the samples, and lets a resumed run "
            "continue at the next sample; use single",
            "external": "this trainer does not support a user's own data loader; use single",
        },
    )
    num_dataset_builder_threads: Count = flag(
        "Number of threads that build datasets in parallel.", 1, unit="THREADS"
    )
    reset_position_ids: bool = switch("Restart positions at 0 in each document of a sample.")
    reset_attention_mask: bool = switch("Let tokens attend only to their own document.")
    eod_mask_loss: bool = switch("Exclude end-of-document tokens from the loss.")
    create_attention_mask_in_dataloader: bool = switch(
        "No effect: attention applies the causal mask itself, unless --reset-attention-mask "
        "requires a different mask.",
        off="--no-create-attention-mask-in-dataloader",
    )

    def __post_init__(self) -> None:
        if self.split is None and (self.data_path is not None or self.mock_data):
            assign(self, "split", _DEFAULT_SPLIT)

    @property
    def has_path_per_split(self) -> bool:
        """Whether training, validation and test each have a list of datasets."""
        return any((self.train_data_path, self.valid_data_path, self.test_data_path))


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Batch.

    ``rampup_batch_size`` is ``(start, increment, samples)``, or ``None`` for a constant batch size.
    """

    micro_batch_size: Samples = required("Number of samples in each microbatch.")
    global_batch_size: Samples = required(
        "Number of samples in each optimizer step, over all ranks.",
        derived="micro batch size x data parallel size",
    )
    rampup_batch_size: tuple[Count, Count, Count] | None = flag(
        "Increase the batch size from START to --global-batch-size in steps of INCREMENT, over the "
        "first SAMPLES samples; requires --train-samples.",
        unit="START INCREMENT SAMPLES",
    )

    def batch_sizes(self) -> tuple[int, ...]:
        """Returns all global batch sizes that the run uses, in ascending order."""
        if self.rampup_batch_size is None:
            return (self.global_batch_size,)
        start, increment, _ = self.rampup_batch_size
        return tuple(range(start, self.global_batch_size + 1, increment))
