"""How unset settings are chosen from others and from the machine: one function for each choice.

The declarations in `schema/` name these functions. Each returns the value and the reason, which the
plan shows.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import yaml

from ppo_cli.addresses import cache_root
from ppo_cli.algo.estimators import ESTIMATORS, POLICY_LOSSES
from ppo_cli.config.device_roles import Roles, read_placement
from ppo_cli.config.models.bundled import bundled_path
from ppo_cli.config.models.folder import EXPERT_KEYS, read_config
from ppo_cli.config.models.known_models import HEADS, JUDGES, choose_adapter, is_url
from ppo_cli.config.models.weight_files import text_config
from ppo_cli.config.schema.unset import Choice, Settings
from ppo_cli.errors import UserError
from ppo_cli.machine.device_record import cache_folder
from ppo_cli.paths import can_write, read_text, user_path
from ppo_cli.plugins import runs_elsewhere

RESTRAIN_SAVES: Final = 20  # checkpoints of a run that may go back to one of them
# Hidden size of the smallest model that was measured to train faster in bfloat16 on a CPU.
MIN_BFLOAT16_WIDTH: Final = 320
DEFAULT_PRETRAIN_STEPS: Final = 50  # at most, if only a target is set
VOTES_TEMPERATURE: Final = 0.7  # of a judge that is asked several times
DEADLINE_CALLS: Final = 3.0  # timeouts of a verdict with its retries
JUDGE_CONTEXT: Final = 8192  # tokens of a request to a judge's server with its answer
# When the cheaper judge of a cascade is unsure: 1.4 levels on a scale of 1-10, its middle.
UNSURE_SPREAD: Final = 0.15
UNSURE_BAND: Final = "0.2-0.8"


def choose_gpus(settings: Settings) -> Choice:
    """Choose the GPUs of a node: as many as one sampler and one split of each layer need."""
    if settings.is_set("trainer.num_workers"):
        return Choice(0, "trainer.num_workers counts ranks without GPUs")
    visible = len(settings.machine.gpus)
    if not visible:
        return Choice(0, "no GPU is visible")
    spans = settings["rollout.tensor_model_parallel_size"], settings["trainer.tensor_parallel_size"]
    needed = math.lcm(*spans)
    why = "one unless it is set" if needed == 1 else "what one sampler and one layer need"
    return Choice(min(visible, needed), why)


def choose_engine(settings: Settings) -> Choice:
    """Choose one process where one can do the job, else several under Ray."""
    gpus = settings["trainer.n_gpus_per_node"]
    # Anything that one process on one device cannot do.
    several = {
        "several GPUs": gpus > 1,
        "several nodes": settings["trainer.nnodes"] > 1,
        "several learners": settings.is_set("trainer.num_workers")
        and settings["trainer.num_workers"] > 1,
        "several samplers": not gpus
        and settings.is_set("rollout.num_samplers")
        and settings["rollout.num_samplers"] > 1,
        "vLLM has separate processes": settings.is_set("rollout.name")
        and settings["rollout.name"] == "vllm",
        "trainer.placement is set": settings["trainer.placement"] is not None,
        "trainer.async_steps is set": settings["trainer.async_steps"] > 0,
    }
    reasons = [why for why, applies in several.items() if applies]
    return Choice("ray", ", ".join(reasons)) if reasons else Choice("local", "one device")


def choose_on_hacking(settings: Settings) -> Choice:
    """Choose what the alarm of exploits does: stop under its older spelling, else warn."""
    if settings["trainer.stop_on_hacking"]:
        return Choice("stop", "trainer.stop_on_hacking is set")
    return Choice("warn", "the alarm may be wrong")


def choose_save_freq(settings: Settings) -> Choice:
    """Choose the steps between checkpoints: close enough to go back, few enough to keep all."""
    if settings["trainer.on_hacking"] != "restrain":
        return Choice(50, "little is lost, and saving takes little time")
    steps = settings["trainer.total_training_steps"]
    if steps is None:
        return Choice(10, "to go back to; --max_steps would make it a twentieth of the run")
    return Choice(max(1, steps // RESTRAIN_SAVES), "a twentieth of the run, to go back to")


def _runs_alone(settings: Settings) -> bool:
    return bool(settings["trainer.engine"] == "local")


def choose_workers(settings: Settings) -> Choice:
    """Choose the learner processes on CPUs."""
    if settings["trainer.n_gpus_per_node"]:
        return Choice(None, "learners are on GPUs")
    if _runs_alone(settings):
        return Choice(1, "one process")
    if slots := _placed(settings).get("train"):
        return Choice(len(slots), "as trainer.placement")
    return Choice(settings["trainer.nnodes"], "one per node")


def choose_samplers(settings: Settings) -> Choice:
    """Choose the sampler processes on CPUs."""
    if settings["trainer.n_gpus_per_node"]:
        return Choice(None, "samplers are on GPUs")
    slots = () if _runs_alone(settings) else _placed(settings).get("rollout", ())
    return Choice(len(slots), "as trainer.placement") if slots else Choice(1, "one")


def _placed(settings: Settings) -> Roles:
    """Return the devices of each role that --placement names; empty if it cannot be read."""
    try:
        return read_placement(settings["trainer.placement"] or "")
    except ValueError:  # refused where placements are checked
        return {}


def choose_sampler(settings: Settings) -> Choice:
    """Choose vLLM where it can run: in separate processes on GPUs."""
    if runs_elsewhere(settings["trainer.engine"]):
        return Choice("vllm", "the engine of a package starts it")
    if not settings["trainer.n_gpus_per_node"]:
        return Choice("hf", "no GPU is used")
    if _runs_alone(settings):
        return Choice("hf", "vLLM needs a separate process")
    if "vllm" not in settings.machine.packages:
        return Choice("hf", "vLLM is not installed")
    return Choice("vllm", "it is installed, and samplers are separate processes on GPUs")


def choose_transfer(settings: Settings) -> Choice:
    """Choose how weights reach vLLM: the fastest way that the self-test has proven here."""
    if settings["rollout.name"] != "vllm":
        return Choice("memory", "the hf sampler shares the weights, or reads them from memory")
    if settings["model.lora_rank"] and not settings["model.lora_merge"]:
        return Choice("memory", "only the LoRA adapter is sent")
    if not settings["trainer.n_gpus_per_node"]:
        return Choice("memory", "no GPU is used")
    # Shared GPUs exchange handles (IPC), separate ones use NCCL; a mixture can do neither.
    roles = _placed(settings)
    train, rollout = {*roles.get("train", ())}, {*roles.get("rollout", ())}
    if not roles:
        shared = not settings["trainer.async_steps"]
    elif train & rollout and not rollout <= train:
        return Choice("memory", "only some GPUs of the samplers train")
    else:
        shared = bool(train & rollout)
    # Other ways may hang on GPUs where nothing has tried them.
    way = "ipc" if shared else "nccl"
    if way == "ipc" and "transfer_ipc" in settings.machine.proven:
        return Choice("ipc", "the self-test has proven it, and GPUs are shared")
    if way == "nccl" and "transfer_nccl" in settings.machine.proven:
        return Choice("nccl", "the self-test has proven it, and samplers have their own GPUs")
    return Choice("memory", f"no self-test has proven {way} here")


def choose_dtype(settings: Settings) -> Choice:
    """Choose the precision of matrix products: the faster one that trains as well.

    That is bfloat16 on a GPU that has it, and in one process on a processor with AVX512-BF16 or AMX
    for a model that is wide enough (notes/lab_book.md). Older GPUs have float16 with scaled losses.
    """
    if gpus := settings["trainer.n_gpus_per_node"]:
        name = settings.machine.gpus[0].name if settings.machine.gpus else "the GPU"
        if settings.machine.has_bfloat16(gpus):
            return Choice("bfloat16", f"{name} has it")
        if "float16" in settings.machine.proven:
            return Choice(
                "float16", f"{name} has no bfloat16, and the self-test has proven float16"
            )
        return Choice("float32", f"{name} has no bfloat16, and no self-test has proven float16")
    # On the CPU: one process, whole weights, a processor with bfloat16 units.
    if not _runs_alone(settings):
        return Choice("float32", "several processes on the CPU")
    if settings["model.quantization"]:
        return Choice("float32", "weights are in 4 bits")
    if not settings.machine.fast_bfloat16:
        return Choice("float32", "this processor is not faster in bfloat16")
    text = text_config(read_config(settings["model.path"]))
    width = text.get("hidden_size") or text.get("n_embd")
    if isinstance(width, int) and width >= MIN_BFLOAT16_WIDTH:
        return Choice("bfloat16", "faster on this processor")
    return Choice("float32", "the model is narrow")


def choose_matmul(settings: Settings) -> Choice:
    """Choose the library that multiplies float32 matrices faster on this processor."""
    return Choice(settings.machine.matmul, "the faster one on this processor")


def choose_spread(settings: Settings) -> Choice:
    """Choose to spread weights on the CPU: on GPUs it was not measured, and others do not do it."""
    if settings["trainer.n_gpus_per_node"]:
        return Choice(False, "on GPUs it was not measured")
    return Choice(True, "on the CPU small updates count from the first step")


def choose_shared_prompts(settings: Settings) -> Choice:
    """Choose whether packed rows compute a shared prompt once."""
    if not settings["trainer.n_gpus_per_node"]:
        return Choice(True, "on the CPU")
    if "shared_prompts" in settings.machine.proven:
        return Choice(True, "the self-test has proven it")
    return Choice(False, "no self-test has proven it on these GPUs")


def choose_compiled(settings: Settings) -> Choice:
    """Choose whether layers are compiled: those of dense models, on one GPU each."""
    if not settings["trainer.n_gpus_per_node"]:
        return Choice(False, "on the CPU compiling takes longer than it saves")
    if "compiled_layers" not in settings.machine.proven:
        return Choice(False, "no self-test has proven it on these GPUs")
    if settings["model.quantization"]:
        return Choice(False, "4-bit weights were not tried")
    if settings["trainer.tensor_parallel_size"] > 1:
        return Choice(False, "tensor parallelism was not tried")
    if _has_experts(settings):
        return Choice(False, "models with experts were not tried")
    return Choice(True, "the self-test has proven it")


def choose_bypass(settings: Settings) -> Choice:
    """Choose whether the sampler's log-probs are the old ones.

    They are equal up to rounding when the sampler uses the actor's weights in float32. In bfloat16,
    with 4-bit weights or with experts rounding differs more, and may send a token to another
    expert. A loss whose ratio is to the sampler needs them.
    """
    if why := why_recompute(settings):
        return Choice(False, why)
    loss = settings["actor.policy_loss.loss_mode"]
    if POLICY_LOSSES[loss].to_sampler:
        return Choice(True, f"the ratio of {loss} is to the sampler")
    if not _runs_alone(settings):
        return Choice(False, "the sampler has separate weights")
    if (dtype := settings["model.dtype"]) != "float32":
        return Choice(False, f"in {dtype} sampler and trainer round differently")
    if settings["model.quantization"]:
        return Choice(False, "with 4-bit weights sampler and trainer round differently")
    if _has_experts(settings):
        return Choice(False, "rounding may send a token to another expert")
    return Choice(True, "the sampler uses the actor's weights")


def _has_experts(settings: Settings) -> bool:
    text = text_config(read_config(settings["model.path"]))
    return any(text.get(name) for name in EXPERT_KEYS)


def why_recompute(settings: Settings) -> str:
    """Return why the sampler's log-probs cannot be the old ones; "" when they can be."""
    correction = "algorithm.rollout_correction"
    full = settings["algorithm.kl_penalty"] == "full"
    if full and settings["algorithm.use_kl_in_reward"]:
        return "the full KL needs the actor's whole vocabulary"
    if settings[f"{correction}.rollout_is"] != "off" or settings[f"{correction}.rollout_rs"]:
        return "rollout_is and rollout_rs compare them with the sampler's"
    return ""


def choose_importance_weights(settings: Settings) -> Choice:
    """Choose weights per token where the policy that samples is not quite the one that trains.

    That is where sampling runs ahead, and where another program samples: its kernels round
    differently, so its tokens come from a slightly other policy. Truncated weights remove that bias
    (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", cap
    2). TRL 1.16 corrects with vLLM by default too (whole sequences, masked above 3), verl 0.9 on
    request (cap 2). A weight per token has the smaller variance: on long responses the product over
    a sequence reaches any cap. Measured gaps are in notes/lab_book.md.

    The hf sampler is the trainer's own program, so it needs none. Nor do losses whose ratio is to
    the sampler: the weight is in their ratio already.
    """
    bypass = "algorithm.rollout_correction.bypass_mode"
    loss = settings["actor.policy_loss.loss_mode"]
    from_sampler = POLICY_LOSSES[loss].to_sampler
    if settings[bypass] if settings.is_set(bypass) else from_sampler:
        return Choice("off", "the ratio of the loss is to the sampler")
    if settings["trainer.async_steps"]:
        return Choice("token", "sampling runs ahead of training")
    if settings["rollout.name"] == "vllm":
        return Choice("token", "vLLM is another program than the trainer, and rounds differently")
    return Choice("off", "the sampler is the trainer's own program, with the newest weights")


def _judge_places(settings: Settings) -> set[str]:
    """Return how the judges place their scores, those of parts of a mixture as well."""
    mixed = settings["reward.composite.enable"]
    parts = settings["reward.composite.parts"].values() if mixed else ()
    judges = [part.get("judge") for part in parts if isinstance(part, Mapping)]
    places = {judge.get("place") for judge in judges if isinstance(judge, Mapping)}
    if mixed or settings["reward.api.enable"]:
        places.add(settings["reward.api.place"])
    return {str(place) for place in places if place}


def choose_estimator(settings: Settings) -> Choice:
    """Choose an estimator that uses the places of rewards where a judge gives them."""
    places, responses = _judge_places(settings), settings["rollout.n"]
    if not places:
        return Choice("gae", "PPO with a critic, which learns from single responses")
    if settings["environment.history"] == "split":
        return Choice("gae", "each turn is a sample, which has no siblings")
    if "criterion" in places and responses > 1:
        return Choice("piece_grpo", "passages of criteria do not line up between responses")
    if responses > 1:
        return Choice("piece_group", f"--rm_place, and {responses} responses to a prompt")
    return Choice("piece_batch", "--rm_place, and one response to a prompt")


def choose_gamma_piece(settings: Settings) -> Choice:
    """Choose a horizon of about ten pieces where rewards have places.

    Longer ones carry the noise of later pieces; at 0.8 an early piece that spoils later ones may
    still pay (notes/lab_book.md).
    """
    if ESTIMATORS[settings["algorithm.adv_estimator"]].pieces:
        return Choice(0.9, "a horizon of about ten pieces")
    if _judge_places(settings):
        return Choice(0.9, "a horizon of about ten pieces, for --rm_place")
    return Choice(1.0, "no judge places rewards")


def choose_kl_in_loss(settings: Settings) -> Choice:
    """Choose the KL in the loss where responses are compared, unless the KL in the reward is set.

    Then only scores are compared, whatever an estimator does with the rest of a reward.
    """
    name = settings["algorithm.adv_estimator"]
    if not ESTIMATORS[name].compares_rewards:
        return Choice(False, f"{name} does not compare rewards")
    if settings.is_set("algorithm.use_kl_in_reward"):
        return Choice(False, "algorithm.use_kl_in_reward is set")
    return Choice(True, f"{name} compares rewards, and the KL is no part of that")


def choose_kl_in_reward(settings: Settings) -> Choice:
    """Choose the KL in the reward where responses are not compared, and it is not in the loss."""
    name = settings["algorithm.adv_estimator"]
    if ESTIMATORS[name].compares_rewards:
        return Choice(False, f"{name} compares rewards, and the KL is no part of that")
    if settings.is_set("actor.use_kl_loss") and settings["actor.use_kl_loss"]:
        return Choice(False, "the KL is in the loss")
    return Choice(True, "no KL is in the loss")


def choose_aggregation(settings: Settings) -> Choice:
    """Choose how the actor's loss is averaged: as usual with its policy loss."""
    name = settings["actor.policy_loss.loss_mode"]
    return Choice(POLICY_LOSSES[name].aggregation, f"usual with {name}")


def choose_lam(settings: Settings) -> Choice:
    """Choose the usual lambda of PPO; set, it is also the critic's."""
    return Choice(0.95, "as usual in PPO")


def choose_critic_lam(settings: Settings) -> Choice:
    """Choose the critic's lambda: its targets are the rewards, unless a lambda is set for both."""
    if runs_elsewhere(settings["trainer.engine"]):
        return Choice(settings["algorithm.lam"], "this engine has one lambda")
    if settings.is_set("algorithm.lam"):
        return Choice(settings["algorithm.lam"], "as algorithm.lam, which is set")
    return Choice(1.0, "targets are the rewards, without the critic's errors")


def choose_pretrain_steps(settings: Settings) -> Choice:
    """Choose at most how many steps pretrain the critic."""
    if settings["critic.pretrain_until"] is None:
        return Choice(0, "no target is set")
    return Choice(DEFAULT_PRETRAIN_STEPS, "at most, until critic.pretrain_until is reached")


def choose_temperature(settings: Settings) -> Choice:
    """Choose a judge's temperature."""
    kind, votes = settings["reward.api.type"], settings["reward.api.votes"]
    temperature = usual_temperature(kind, votes)
    if temperature is None:
        return Choice(None, f"models of {kind} take none")
    return Choice(temperature, "one vote" if votes == 1 else f"{votes} votes")


def usual_temperature(kind: str, votes: int) -> float | None:
    """Return a judge's temperature: votes must be able to differ; None: its models take none."""
    if not JUDGES[kind].temperature:
        return None
    return 0.0 if votes == 1 else VOTES_TEMPERATURE


def choose_deadline(settings: Settings) -> Choice:
    """Choose the time of a verdict with its retries."""
    return Choice(DEADLINE_CALLS * settings["reward.api.timeout"], "3 x reward.api.timeout")


def choose_scale(settings: Settings) -> Choice:
    """Choose the scale that the judge's prompt declares."""
    if settings["reward.api.rubric"] or settings["reward.api.mode"] == "compare":
        return Choice(None, "criteria and comparisons come to a score from 0 to 1")
    prompt = _read_judge_prompt(settings)
    if settings["reward.api.scoring_prompt"] or "scale" not in prompt:
        return Choice(None, "the range in the text of the prompt, else 1-10")
    return Choice(str(prompt["scale"]), "the prompt's")


def choose_output(settings: Settings) -> Choice:
    """Choose the format that the judge's prompt declares."""
    if settings["reward.api.rubric"] or settings["reward.api.mode"] != "text":
        return Choice("json", "criteria, comparisons and decisions have no other")
    return Choice(_read_judge_prompt(settings).get("output", "json"), "the prompt's, else json")


def _read_judge_prompt(settings: Settings) -> dict[str, Any]:
    """Return the keys of the judge's prompt file; {} for a file that the run refuses."""
    path = settings["reward.api.prompt_file"]
    bundled = bundled_path("reward_prompts", f"{settings['reward.api.prompt_preset']}.yaml")
    try:
        prompt = _parse(read_text(user_path(path) if path else bundled))
    except (OSError, ValueError, RecursionError, UserError, yaml.YAMLError):
        return {}
    return prompt if isinstance(prompt, dict) else {}


@lru_cache(maxsize=8)  # every resolution asks twice, which took four fifths of its time
def _parse(text: str) -> Any:
    return yaml.safe_load(text)


def choose_cache(settings: Settings) -> Choice:
    """Choose one file of verdicts for all runs, or one in a run folder that is copied."""
    path = f"{settings['trainer.output_dir']}/verdicts.sqlite"
    if settings["trainer.store"]:
        return Choice(path, "verdicts that were paid for are copied with the run")
    folder = cache_folder()
    if folder is None or not can_write(folder):
        return Choice(path, f"{folder or 'the home folder'} cannot be written to")
    return Choice(f"{cache_root()}/judge.sqlite", "one file for all runs")


def choose_rubric_order(settings: Settings) -> Choice:
    """Choose another order of the criteria for each judge of a panel."""
    if settings["reward.api.panel.judges"]:
        return Choice("shuffled", "several judges in a panel")
    return Choice("fixed", "no panel")


def choose_panel_least(settings: Settings) -> Choice:
    """Choose more than half of a panel."""
    if not (others := settings["reward.api.panel.judges"]):
        return Choice(None, "no panel")
    return Choice((1 + len(others)) // 2 + 1, f"more than half of {1 + len(others)} judges")


def choose_cascade_spread(settings: Settings) -> Choice:
    """Choose a spread if the cheaper judge shows one, and no band is set."""
    if settings.is_set("reward.api.cascade.band"):
        return Choice(None, "reward.api.cascade.band is set")
    if why := _why_no_spread(settings):
        return Choice(None, why)
    return Choice(UNSURE_SPREAD, "the cheaper judge has several votes or probabilities")


def choose_cascade_band(settings: Settings) -> Choice:
    """Choose a band if the cheaper judge shows no spread, and none is set."""
    if settings.is_set("reward.api.cascade.spread"):
        return Choice(None, "reward.api.cascade.spread is set")
    why = _why_no_spread(settings)
    if not why:
        return Choice(None, "the spread of the cheaper judge decides")
    return Choice(UNSURE_BAND if settings["reward.api.cascade.model"] else None, why)


def _why_no_spread(settings: Settings) -> str:
    """Return why the verdicts of a cheaper judge show no spread; "" if they do."""
    if not (name := settings["reward.api.cascade.model"]):
        return "no cheaper judge"
    cheap = settings.of_judge(name)
    if cheap and (cheap["reward.api.mode"] == "decision" or cheap["reward.api.votes"] > 1):
        return ""
    return "the cheaper judge has neither votes nor probabilities"


def choose_reward_device(settings: Settings) -> Choice:
    """Choose a GPU for a reward model if there is one."""
    if settings.machine.gpus:
        return Choice("cuda", "a GPU is visible")
    if settings["trainer.n_gpus_per_node"]:
        return Choice("cuda", "the run uses GPUs")
    return Choice("cpu", "no GPU is visible")


def choose_reward_dtype(settings: Settings) -> Choice:
    """Choose the precision of a reward model: bfloat16 on a GPU that has it."""
    if settings["reward.model.device"] == "cpu":
        return Choice("float32", "on the CPU")
    if settings.machine.has_bfloat16(1):
        return Choice("bfloat16", "on a GPU")
    return Choice("float32", "the GPU has no bfloat16")


def choose_reward_length(settings: Settings) -> Choice:
    """Choose the most tokens that the authors of a kind of reward model used."""
    if not (path := settings["reward.model.path"]):
        return Choice(None, "no reward model")
    if is_url(path):
        return Choice(None, "its server has a maximum")
    try:
        adapter = choose_adapter(path, settings["reward.model.adapter"]).adapter
    except UserError:  # refused where reward models are checked
        return Choice(None, "its files are not those of a reward model")
    if adapter not in HEADS:  # of a server: refused where reward models are checked
        return Choice(None, "its adapter is that of a server")
    length = HEADS[adapter].max_length
    positions = text_config(read_config(path)).get("max_position_embeddings")
    if isinstance(positions, int) and 0 < positions < length:
        return Choice(positions, "the positions in its config.json")
    return Choice(length, f"the maximum of {adapter} models")


def choose_mixture(settings: Settings) -> Choice:
    """Choose a mixture if it has parts."""
    parts = ("reward.parts", "reward.composite.weights", "reward.composite.parts")
    if any(settings[key] for key in parts):
        return Choice(True, "parts are set")
    return Choice(False, "no parts are set")


def choose_sandbox(settings: Settings) -> Choice:
    """Leave the sandbox of code to the start, which tries them."""
    return Choice(None, "the start tries bubblewrap, then sandlock")


def choose_judge_context(settings: Settings) -> Choice:
    """Choose the tokens that a judge's server accepts, by its model's config.json."""
    if settings["reward.api.type"] != "local" or not (path := settings["reward.api.model"]):
        return Choice(None, "the run starts no judge")
    if not (config_json := read_config(path)):
        return Choice(None, "the server reads its model's maximum")
    limit = text_config(config_json).get("max_position_embeddings")
    if isinstance(limit, int) and limit < JUDGE_CONTEXT:
        return Choice(limit, "the maximum of its model")
    return Choice(JUDGE_CONTEXT, "judges need no more, and more takes memory")


def choose_threads(settings: Settings) -> Choice:
    """Choose OMP_NUM_THREADS; without it processes count the cores when they start."""
    if not _runs_alone(settings):
        return Choice(None, "a worker takes one, or on GPUs its share of the cores of its node")
    if settings.machine.threads is not None:
        return Choice(settings.machine.threads, "OMP_NUM_THREADS")
    if settings.machine.usual_threads is not None:
        return Choice(settings.machine.usual_threads, "one per core")
    return Choice(None, "OMP_NUM_THREADS and MKL_NUM_THREADS, as torch reads them")


def choose_isolation(settings: Settings) -> Choice:
    """Choose one process for verifiers, whose server and tasks are shared by its episodes."""
    if str(settings["environment.path"] or "").startswith("verifiers:"):
        return Choice("process", "verifiers shares a server between episodes")
    return Choice("episode", "a call harms its own episode alone")


def choose_starts(settings: Settings) -> Choice:
    """Choose few episodes that begin at once where each may start a server."""
    own_servers = settings["environment.mcp_scope"] == "episode"
    if settings["environment.isolation"] == "process" or own_servers:
        return Choice(8, "each may start a server")
    return Choice(256, "a fork is fast")


def choose_python(settings: Settings) -> Choice:
    """Choose the Python of environments: this one."""
    return Choice(os.path.abspath(sys.executable), "it runs this program")
