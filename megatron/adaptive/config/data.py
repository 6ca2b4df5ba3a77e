"""Training data and batches."""

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
        "Tokenizer; NullTokenizer takes ids as they are and needs --vocab-size.",
        "GPT2BPETokenizer",
        choices=(
            *("GPT2BPETokenizer", "HuggingFaceTokenizer", "SentencePieceTokenizer"),
            *("GPTSentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer", "NullTokenizer"),
        ),
        refused_choices={
            "BertWordPieceLowerCase": _NOT_GPT,
            "BertWordPieceCase": _NOT_GPT,
            "MultimodalTokenizer": _NOT_GPT,
            "NullMultimodalTokenizer": _NOT_GPT,
            "SFTTokenizer": "--sft takes any tokenizer, with the template of its folder; use "
            "HuggingFaceTokenizer",
        },
        derived="GPT2BPETokenizer; NullTokenizer with --mock-data and --vocab-size alone",
    )
    tokenizer_model: str | None = flag(
        "Folder with tokenizer.json for HuggingFaceTokenizer, or the file of SentencePiece's "
        "tokenizers or of TikTokenizer.",
        unit="PATH",
    )
    vocab_size: Count | None = flag(
        "Ids before padding: for NullTokenizer and TikTokenizer; with the others the rows that the "
        "model has at least.",
        unit="IDS",
    )
    vocab_file: File | None = flag("Vocabulary of GPT2BPETokenizer (JSON).")
    merge_file: File | None = flag("Merges of GPT2BPETokenizer.")
    tiktoken_pattern: str = flag(
        "How TikTokenizer parts text into words.", "v2", choices=("v1", "v2")
    )
    tiktoken_num_special_tokens: Count = flag(
        "Ids that TikTokenizer keeps for special tokens.", 1000, unit="IDS"
    )

    @property
    def missing(self) -> list[str]:
        """Flags that the tokenizer needs and that are not given."""
        needs = {
            "NullTokenizer": ("vocab_size",),
            "GPT2BPETokenizer": ("vocab_file", "merge_file"),
        }.get(self.tokenizer_type, ("tokenizer_model",))
        return [f"--{name.replace('_', '-')}" for name in needs if not getattr(self, name)]


@dataclass(frozen=True, kw_only=True)
class DataConfig(TokenizerConfig):
    """Data.

    A list of datasets is one prefix, several prefixes, or weights and prefixes in turn. After
    parsing, ``data_path`` also holds what ``--data-args-path`` names, and ``split`` is set
    whenever one dataset serves training, validation and test.
    """

    data_path: tuple[str, ...] | None = flag(
        "Prefixes of .bin and .idx files, weighted or not, divided by --split.",
        unit="[WEIGHT] PREFIX",
    )
    data_args_path: File | None = flag("File that holds the value of --data-path.")
    split: str | None = flag(
        "Shares of training, validation and test.",
        unit="SHARES",
        derived="969,30,1 with --data-path and --mock-data",
    )
    train_data_path: tuple[str, ...] | None = flag(
        "Datasets for training only, in place of --data-path.", unit="[WEIGHT] PREFIX"
    )
    valid_data_path: tuple[str, ...] | None = flag(
        "Datasets for validation only.", unit="[WEIGHT] PREFIX"
    )
    test_data_path: tuple[str, ...] | None = flag(
        "Datasets for the test only.", unit="[WEIGHT] PREFIX"
    )
    data_cache_path: Folder | None = flag(
        "Folder for the index files made from the data.", derived="next to the data"
    )
    mock_data: bool = switch("Made-up samples, no files.")
    mmap_bin_files: bool = switch(
        "Read .bin files instead of mapping them into memory.", off="--no-mmap-bin-files"
    )
    variable_seq_lengths: bool = switch(
        "Samples are documents, cut at --seq-length and never glued; the loss is the mean over all "
        "tokens of the batch."
    )
    pack_to: Count | None = flag(
        "With --variable-seq-lengths: pack documents into microbatches of so many tokens at most, "
        "with attention within each; without it every microbatch is padded to its longest.",
        unit="TOKENS",
    )
    sft: bool = switch(
        "With --variable-seq-lengths: data files are JSON lines of conversations, of which only "
        "what the assistant says is taught."
    )
    num_workers: Natural | None = flag(
        "Processes that load data, of each rank that needs it; by default 2 on a GPU, and none on "
        "a CPU, where they would take the rank's time.",
        unit="PROCESSES",
    )
    dataloader_type: str = flag(
        "No effect: samples are taken in the order that the dataset shuffled them to.",
        "single",
        choices=("single",),
        refused_choices={
            "cyclic": "samples are in random order already and repeat when they are used up, and "
            "a resumed run goes on at the same sample only with single; use single",
            "external": "this trainer takes no loader from outside; use single",
        },
    )
    num_dataset_builder_threads: Count = flag(
        "Threads that build several datasets at once.", 1, unit="THREADS"
    )
    reset_position_ids: bool = switch("Count positions anew after each document.")
    reset_attention_mask: bool = switch("Let no token see a document before its own.")
    eod_mask_loss: bool = switch("Leave the end of documents out of the loss.")
    create_attention_mask_in_dataloader: bool = switch(
        "No effect: the causal mask is left to attention unless --reset-attention-mask makes one.",
        off="--no-create-attention-mask-in-dataloader",
    )

    def __post_init__(self) -> None:
        if self.split is None and (self.data_path is not None or self.mock_data):
            assign(self, "split", _DEFAULT_SPLIT)

    @property
    def has_path_per_split(self) -> bool:
        """True if training, validation and test have datasets of their own."""
        return any((self.train_data_path, self.valid_data_path, self.test_data_path))


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Batch.

    ``rampup_batch_size`` is ``(start, increment, samples)`` or ``None``.
    """

    micro_batch_size: Samples = required("Samples of each microbatch.")
    global_batch_size: Samples = required(
        "Samples of each optimizer step over all ranks.",
        derived="micro batch size x data parallel size",
    )
    rampup_batch_size: tuple[Count, Count, Count] | None = flag(
        "Grow the batch from START by INCREMENT up to --global-batch-size over SAMPLES; needs "
        "--train-samples.",
        unit="START INCREMENT SAMPLES",
    )

    def batch_sizes(self) -> tuple[int, ...]:
        """Every global batch size of the run in order, one unless it is ramped up."""
        if self.rampup_batch_size is None:
            return (self.global_batch_size,)
        start, increment, _ = self.rampup_batch_size
        return tuple(range(start, self.global_batch_size + 1, increment))
