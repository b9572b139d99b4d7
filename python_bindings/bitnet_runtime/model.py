"""A packed model, open."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Self, Unpack, cast, overload

from bitnet_runtime import machine
from bitnet_runtime._native import ffi, lib
from bitnet_runtime.abilities import require_next_token
from bitnet_runtime.answers.ready import ready, tokens_of
from bitnet_runtime.answers.receipt import Receipt
from bitnet_runtime.answers.result import Result
from bitnet_runtime.answers.stream import Stream, finish
from bitnet_runtime.answers.together import IN_FLIGHT, Batch, generate_batch
from bitnet_runtime.answers.verifying import Verdict, verify
from bitnet_runtime.answers.writer import Writer
from bitnet_runtime.asynchronous import ModelAsync
from bitnet_runtime.defaults import Options, Sampling, resolve, truth, whole, with_options
from bitnet_runtime.errors import InvalidParameterError, check_open, naming, shown
from bitnet_runtime.handles import Handle
from bitnet_runtime.ids import is_several, refuse_several
from bitnet_runtime.model_chat import ModelChat
from bitnet_runtime.model_embedding import ModelEmbedding
from bitnet_runtime.model_sessions import ModelSessions
from bitnet_runtime.paths import Adapters, files_of, of_which, path_of
from bitnet_runtime.shape import KV_TYPES

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from bitnet_runtime.ids import Prompt
    from bitnet_runtime.images.processor import Image
    from bitnet_runtime.sessions.session import Session


class Model(ModelAsync, ModelSessions, ModelEmbedding, ModelChat):
    """A packed model, open. Made by `Model.load`; a context manager.

    Safe to share between threads: each call of `generate`, `stream`, `chat` and `score` works in
    a session of its own, and the sessions take turns on the model's threads.

    A prompt is a text or token ids: a list or another sequence of ints, or an array of one dimension.
    """

    def __init__(self, *_: object, **__: object) -> None:
        """Do not call this: `Model.load` opens a model."""
        raise TypeError("Model.load(path) opens a model")

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        n_ctx: int | None = None,
        threads: int | None = None,
        isa: str | None = None,
        kv_type: str = "f16",
        verify: bool = True,
        mmap: bool = True,
        cache_bytes: int | None = None,
        adapters: Adapters = (),
        chat_template: str | None = None,
    ) -> Self:
        """Open a packed file.

        n_ctx: context of new sessions, in tokens; None: the model's maximum.
        threads: None: physical cores, within what affinity and cgroup allow.
        isa: a tier name such as "avx2" or "scalar"; None: the best, or that in the environment variable BITNET_ISA.
        kv_type: numbers in the KV cache: "f16"; "int8", half as large; "k4v8", keys in 4 bits; "f32", for comparisons.
            Keys and values of images are not kept: int8 with "int8" and "k4v8", which is faster, else f32.
        verify: check every byte of the weights.
        mmap: False reads the file into memory, so that it may be changed or deleted afterwards.
        cache_bytes: most bytes of the KV caches of all sessions together; None: no limit. A call that would need
            more raises CacheFullError and does nothing; see `Session.fork` for what texts can share.
        adapters: files of adapters of this model: a list, named by their files, or a dictionary of names. A text can
            have one of them.
        chat_template: in Jinja's language, in place of the file's, or for a file without one.

        A session that does not fit in memory is refused, never made smaller; see `session`.

        Raises ModelFileError (ModelNotFoundError: there is none), ModelFormatError,
        ModelTooLargeError or InvalidParameterError.
        """
        file = path_of(path)
        count = 0 if threads is None else whole("threads", threads, 1, 256)
        if not isinstance(kv_type, str) or kv_type not in KV_TYPES:
            raise InvalidParameterError(
                f"kv_type is {shown(kv_type)}, expected one of {', '.join(KV_TYPES)}", "kv_type"
            )
        if isa is not None and isa not in machine.available_isas():
            raise machine.unknown_isa("isa", isa)
        skips = {"no_mmap": not truth("mmap", mmap), "no_verify": not truth("verify", verify)}
        name = ffi.new("char[]", isa.encode()) if isa else ffi.NULL
        most = 0 if cache_bytes is None else whole("cache_bytes", cache_bytes, 1, 2**63 - 1)
        fields = skips | {"threads": count, "isa": name, "cache_bytes": most}
        fields["image_kv_type"] = KV_TYPES[kv_type]
        named = files_of(adapters)
        paths = [ffi.new("char[]", os.fsencode(path)) for path in named.values()]
        array = ffi.new("char *[]", paths)
        fields |= {"adapters": array, "n_adapters": len(paths)}
        handle, detail = Handle("model"), ffi.new("char[]", lib.BN_DETAIL_SIZE)
        status = lib.bn_model_open(os.fsencode(file), ffi.new("bn_load_options *", fields), handle.cell, detail)
        if status:
            of_environment = os.environ.get("BITNET_ISA") if isa is None else None
            if of_environment and of_environment not in machine.available_isas():
                raise machine.unknown_isa("BITNET_ISA", of_environment)
            why, path = of_which(ffi.string(detail).decode("utf-8", "replace"), file, [*named.values()])
            check_open(status, why, path, is_adapter=path != file)
        model = cls.__new__(cls)
        model._describe(file, handle, n_ctx, kv_type, named, chat_template)
        return model

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str, and one prompt
        self,
        prompt: Prompt,
        *,
        images: Image | Sequence[Image] | None = None,
        session: Session | None = None,
        adapter: str | None = None,
        receipt: bool = False,
        logprobs: int | None = None,
        options: Sampling | None = None,
        **sampling: Unpack[Options],
    ) -> Result: ...
    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        *,
        images: Sequence[Sequence[Image]] | None = None,
        adapter: str | None = None,
        receipt: bool = False,
        logprobs: int | None = None,
        options: Sampling | None = None,
        **sampling: Unpack[Options],
    ) -> list[Result]: ...

    @with_options
    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        images: Image | Sequence[Image] | Sequence[Sequence[Image]] | None = None,
        session: Session | None = None,
        adapter: str | None = None,
        receipt: bool = False,
        logprobs: int | None = None,
        options: Sampling | None = None,
        **sampling: Unpack[Options],
    ) -> Result | list[Result]:
        """Continue a prompt.

        A list of prompts gives a list of results. Up to 16 are computed in a batch, or as many as `cache_bytes` has
        room for. Each result is the one its prompt gives alone. An empty list is an error, because it could also be
        a prompt without tokens.

        images: pictures for the prompt, or None; for several prompts a list of pictures each. They come before the
        text, or where token ids have the image token, and a line break ends the text, as PaliGemma was trained.
        session: one to use; what it already holds of the prompt's beginning is not computed again. If the model's
        `mask` is "prefix", the prompt is the prefix, and is computed each time.
        adapter: the name of an adapter that the model was loaded with; a session keeps its own.
        receipt: add one to the result, with which `verify_receipt` on any machine can repeat the answer. The first
        one takes the time to hash the model file.
        logprobs: 0 to 20; the result then has the log-probability of each token, in nats, and of so many of the most
        likely ones: those of the model itself, before temperature, penalties and formats. Nothing is guessed then, so
        it takes longer.
        options: a whole set of options, in place of the model's own.
        """
        if not is_several(prompt, "prompt"):
            one = cast("Image | Sequence[Image] | None", images)
            given = cast("Prompt", prompt)
            if not isinstance(given, str) and not len(given):
                raise InvalidParameterError(
                    "the prompt is an empty list; give at least one token id, or at least one prompt", "prompt"
                )
            kept: dict[str, Any] = {"session": session, "adapter": adapter, "receipt": receipt, "logprobs": logprobs}
            return finish(self.stream(given, images=one, options=options, **kept, **sampling))
        if session is not None:
            raise InvalidParameterError("a session takes one prompt, and several prompts are given", "session")
        chosen = resolve(sampling, options, self.defaults)
        prompts, each = cast("Sequence[Prompt]", prompt), cast("Sequence[Sequence[Image] | None]", images)
        if images is None:
            each = [None] * len(prompts)
        elif not isinstance(images, (list, tuple)) or len(images) != len(prompts):
            raise InvalidParameterError(
                f"images is {shown(images)}, expected {len(prompts)} lists, of the pictures of each prompt", "images"
            )
        made = []  # all, before any work
        for i, (of_text, of_it) in enumerate(zip(prompts, each, strict=True)):
            with naming(f"prompt {i}"):
                made.append(ready(self, of_text, of_it))
        more: dict[str, Any] = {"receipt": receipt, "adapter": adapter, "logprobs": logprobs}

        def stream(tokens: list[int], pixels: NDArray[np.float32] | None) -> Stream:
            return Stream(Writer(self, tokens, chosen, pixels=pixels, **more))

        return generate_batch(partial(stream, *each) for each in made)

    def stream(
        self,
        prompt: Prompt,
        *,
        images: Image | Sequence[Image] | None = None,
        session: Session | None = None,
        adapter: str | None = None,
        receipt: bool = False,
        logprobs: int | None = None,
        options: Sampling | None = None,
        **sampling: Unpack[Options],
    ) -> Stream:
        """`generate` as an iterator of pieces. Wrong options raise here, not on the first piece."""
        refuse_several(prompt, "prompt", "only generate takes a list")
        chosen = resolve(sampling, options, self.defaults)
        return self._continue(prompt, images, session, adapter, receipt, chosen, logprobs=logprobs)

    def batch(self, most: int = IN_FLIGHT) -> Batch:
        """Continuous batching: texts join while others run, and leave: `for stream, piece, done in batch`.

        `batch.add(prompt, **options)` takes what `stream` takes, and returns that. Each is what it would be alone.
        Prefill is chunked, beside answers that run, which then take about twice the time for a token. most: texts at a
        time.
        """
        return Batch(self.stream, whole("most", most, 1, 1024))

    def infill(
        self,
        before: str,
        behind: str,
        *,
        adapter: str | None = None,
        receipt: bool = False,
        logprobs: int | None = None,
        options: Sampling | None = None,
        **sampling: Unpack[Options],
    ) -> Result:
        """What belongs between two texts, of a model that learned that: see `infill_prompt`. Options as in `generate`.

        For its pieces: `stream(infill_prompt(before, behind))`.
        """
        chosen = resolve(sampling, options, self.defaults)
        prompt = self.infill_prompt(before, behind, chosen.max_tokens)
        return finish(self.stream(prompt, adapter=adapter, receipt=receipt, logprobs=logprobs, options=chosen))

    def score(self, text: Prompt, *, adapter: str | None = None) -> list[float]:
        """Natural log of the probability of each token, given all before it.

        One number a token of `tokenize(text)`; the first is NaN, as nothing comes before it. Of a model whose
        `mask` is "prefix" all tokens are scored as causal ones, without a prefix. Raises UnsupportedModelError
        for a bidirectional model.
        """
        require_next_token(self)
        refuse_several(text, "text", "score takes one text; call it for each")
        tokens = tokens_of(self, text, "text", self.n_ctx)
        if not tokens:
            return []
        with self.session(n_ctx=len(tokens), adapter=adapter) as session:
            return session.score(tokens)

    def verify_receipt(self, receipt: Receipt | str | bytes | dict[str, Any]) -> Verdict:
        """Whether this model makes the answer of a receipt, or of its JSON, and at which token it does not.

        Takes about the time of a prompt as long, and of choosing its tokens. Raises ReceiptError: it is none, or
        cannot be of any answer.
        """
        return verify(self, receipt if isinstance(receipt, Receipt) else Receipt.from_json(receipt))

    def __repr__(self) -> str:
        if self._handle is None:
            return f"<Model {self.path.name} closed>"
        return (
            f"<Model {self.path.name}: {self.info.ternary_weights:,} ternary weights, "
            f"{self.info.file_bytes / 1e6:.1f} MB, context {self.n_ctx}, {self.isa}, threads {self.threads}>"
        )
