"""What a user can set: frozen pydantic models, two levels, unknown keys refused.

In: plain values from TOML files and flags (see load.py). Out: `Config`. Rules that join two sections live in plan.py, so that every
message can say which files set the values. Nothing here imports torch, ray, vllm or megatron.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Probability = Annotated[float, Field(ge=0.0, le=1.0)]


TrainerFault = Literal[
    "none", "no-sinks", "window", "no-window", "yarn", "yarn-rounded", "router-bias", "gate-up", "temperature", "shifted"
]
# What parity.perturb may name.
PERTURBATIONS = ("no-sinks", "window", "no-window", "yarn", "yarn-rounded", "router-bias", "gate-up")

AttentionBackend = Literal["reference", "triton", "flash", "te"]
WeightSync = Literal["inline", "broadcast", "shared"]

MOST_IN_FLIGHT = 8000  # turns of one engine


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class RunConfig(Section):
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9._-]+$")
    id: str = Field(default="", pattern=r"^[A-Za-z0-9._-]*$", description="empty: date and time, so that runs never meet")
    dir: str = Field(default="runs", description="folder that holds run directories")
    seed: NonNegative = 0
    steps: Positive = 40
    save_every: NonNegative = Field(default=20, description="steps between checkpoints of `gptoss train`; 0: only at the end")
    save_at_end: bool = Field(default=True, description="a checkpoint after the last step of `gptoss train`")
    keep_checkpoints: NonNegative = Field(
        default=2,
        description="newest complete checkpoints that stay when a further one is whole; 0: all",
    )
    keep_every: NonNegative = Field(default=0, description="checkpoints of steps that this divides stay for good; 0: of none")
    save_in_background: bool = Field(
        default=True,
        description="write checkpoints from a copy in host memory while training goes on; false: training waits, and no copy is made",
    )
    archive_scores: bool = Field(
        default=True,
        description="write rollouts/step-N.scores.jsonl too: the advantage and the trainer's log-prob of every trained token",
    )
    trace_steps: NonNegative = Field(
        default=0,
        description="steps of which trace.json shows where the time went, in driver, trainer and engines; the last ones of the run. The "
        "trainer then waits for its GPU at the borders of what is measured. 0: none",
    )
    eval_every: NonNegative = Field(default=10, description="steps between held-out evaluations; 0: only at start and end")
    eval_prompts: NonNegative = Field(default=64, description="held-out prompts per periodic evaluation; 0: none")
    final_eval_prompts: NonNegative = Field(default=300, description="held-out prompts at the start and at the end")
    resume: str = Field(default="", description="run directory to continue")
    init: str = Field(
        default="",
        description="where the first weights come from: a run directory, a checkpoint, or a Hugging Face folder; empty: random",
    )


class ModelConfig(Section):
    """GPT-OSS's architecture. Names and meaning are those of the Hugging Face config.json; defaults are the 20B's published values."""

    num_hidden_layers: Positive = 24
    hidden_size: Positive = 2880
    intermediate_size: Positive = 2880
    num_attention_heads: Positive = 64
    num_key_value_heads: Positive = 8
    head_dim: Positive = 64
    num_local_experts: Positive = 32
    num_experts_per_tok: Positive = 4
    vocab_size: Positive = 201088
    sliding_window: Positive = Field(default=128, description="visible keys in even layers (0, 2, ...), the token itself included")
    max_position_embeddings: Positive = 131072
    rope_theta: float = 150000.0
    rope_factor: float = 32.0
    rope_original_max_position: Positive = 4096
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    rms_norm_eps: float = 1e-5
    swiglu_limit: float = 7.0
    initializer_range: float = 0.02


class TokenizerConfig(Section):
    name: Literal["tiny", "gpt-oss"] = "gpt-oss"
    path: str = Field(
        default="",
        description="gpt-oss: folder of o200k_base.tiktoken; empty: TIKTOKEN_ENCODINGS_BASE, then the folder of task.path, then a download",
    )


class TaskConfig(Section):
    name: str = Field(
        default="arithmetic",
        description="arithmetic, gsm8k, retool, verify_if; or a task of your own: my_task.py, or a module (docs/bring_your_own_task.md)",
    )
    path: str = Field(default="", description="prompt file (JSON lines), for tasks that read one")
    operations: Annotated[int, Field(ge=2, le=20)] = Field(
        default=2,
        description="arithmetic: of a problem; a right solution calls once for each. Of more than 20 hardly any draw keeps to six digits",
    )
    digits: Annotated[int, Field(ge=2, le=5)] = Field(
        default=2, description="arithmetic: of a problem's first two numbers; the others have one less, and no value more than six"
    )
    eval_path: str = Field(
        default="",
        description="held-out prompt file; empty: a tenth of `path`, chosen by hash, that training never sees",
    )
    reasoning: Literal["low", "medium", "high"] = "low"
    check_timeout_s: Seconds = 5.0
    judging: Literal["strict", "loose"] = Field(
        default="strict",
        description="verify_if: the verdict that is rewarded; loose forgives a first or last line and asterisks. Both are measured",
    )
    partial: bool = Field(default=False, description="verify_if: reward the share of instructions followed, not only all of them")
    nltk_data: str = Field(default="", description="verify_if: folder of NLTK's data; empty: NLTK_DATA, then where NLTK looks by itself")
    sandbox: Literal["bubblewrap", "none"] = Field(
        default="bubblewrap",
        description="retool: walls around the programs a model writes; none: limits only, this machine's files and network are open",
    )
    sandbox_processes: Positive = Field(default=2, description="retool: programs that run at once")
    sandbox_timeout_s: Seconds = Field(default=5.0, description="retool: wall clock of a program; its processor time too, in whole seconds")
    sandbox_memory_mib: Positive = Field(default=512, description="retool: memory of a program")
    sandbox_output_bytes: Positive = Field(default=16384, description="retool: output of a program; more ends it")
    sandbox_modules: str = Field(default="sympy,numpy", description="retool: modules imported before any program, with commas")


class OptimizerFields(Section):
    lr: Annotated[float, Field(gt=0)] = 4e-4
    warmup_steps: NonNegative = 3
    decay: Literal["constant", "linear", "cosine"] = "linear"
    min_lr_ratio: Probability = 0.1
    beta1: Probability = 0.9
    beta2: Probability = 0.95
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip_grad: Annotated[float, Field(gt=0)] = 1.0


class SftConfig(OptimizerFields):
    """Warm start on generated transcripts."""

    lr: Annotated[float, Field(gt=0)] = 2e-3
    warmup_steps: NonNegative = 40
    decay: Literal["constant", "linear", "cosine"] = "cosine"
    beta2: Probability = 0.98
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    steps: Positive = 600
    sequences_per_step: Positive = 32
    guess_fraction: Probability = Field(default=0.10, description="demonstrations that answer without calling the tool")
    stop_fraction: Probability = Field(default=0.50, description="demonstrations that stop after the first result")
    digit_fraction: Probability = Field(default=0.03, description="demonstrations with one wrong digit")
    min_copy_probability: Probability = Field(
        default=0.88,
        description="gate: exact probability of copying every operand and result right, on held-out problems",
    )
    save_every: NonNegative = Field(default=200, description="steps between checkpoints of a warm start; 0: only at the end")
    extra_steps: NonNegative = Field(
        default=300,
        description="steps added, at a tenth of the learning rate or more, while the gate is missed",
    )


class RlConfig(OptimizerFields):
    sequences_per_step: Positive = Field(default=64, description="rollouts in one step, over all groups")
    minibatches: Positive = Field(default=1, description="optimizer updates per step and epoch")
    epochs: Positive = 1
    advantage: Literal["group", "group-mean", "rloo", "reinforce++", "reinforce++-baseline", "gae"] = Field(
        default="group",
        description="group: GRPO, divided by the group's standard deviation; group-mean: Dr.GRPO, not; rloo: against the mean of the "
        "others; reinforce++: no group, whitened over the step; reinforce++-baseline: less the group's mean, then whitened; gae: a critic",
    )
    credit: Literal["auto", "sequence", "turn", "token"] = Field(
        default="auto",
        description="what gets an advantage of its own: the rollout, each assistant turn, or each token (discounted rewards from there "
        "on); auto: token with gae, else sequence",
    )
    gamma: Probability = Field(default=1.0, description="discount of rewards, per turn or token as rl.credit says")
    gae_lambda: Probability = Field(default=1.0, description="lambda of generalized advantage estimation; 1: no bias from the critic")
    value_clip: Annotated[float, Field(ge=0)] = Field(default=0.2, description="how far a critic's value may move in one step; 0: any")
    critic_lr: Annotated[float, Field(gt=0)] = Field(
        default=2e-3,
        description="gae: the critic's learning rate; warm-up, decay and the other keys of the optimizer are those of the policy",
    )
    critic_epochs: Positive = Field(
        default=4,
        description="gae: times the critic learns from each step's rollouts; its values are of little use before it has seen many",
    )
    critic_warmup_steps: NonNegative = Field(
        default=3,
        description="gae: first steps of a run in which only the critic learns, since advantages are no better than its values",
    )
    whiten_advantages: bool = Field(default=False, description="mean 0 and variance 1 over all trained tokens of the step")
    overlong_buffer_tokens: NonNegative = Field(
        default=0,
        description="DAPO's soft punishment: reward falls over this many last tokens of rollout.max_sequence_tokens; 0: none",
    )
    overlong_penalty: Annotated[float, Field(ge=0)] = Field(default=1.0, description="what a conversation of full length loses by it")
    drop_uniform_groups: bool = Field(
        default=True,
        description="leave out groups whose rewards are all equal, where that means that they teach nothing: not with gae, reinforce++, KL "
        "in the reward, or gamma below 1",
    )
    surrogate: Literal["ppo", "gspo", "cispo"] = Field(
        default="ppo",
        description="ppo: a token's ratio is clipped; gspo: its sequence's; cispo: the clipped ratio weighs REINFORCE",
    )
    clip_low: Annotated[float, Field(gt=0, le=1)] = Field(default=0.2, description="ratios are clipped at 1 - clip_low; 1: not from below")
    clip_high: Annotated[float, Field(gt=0)] = Field(default=0.28, description="ratios are clipped at 1 + clip_high")
    dual_clip: Annotated[float, Field(ge=0)] = Field(
        default=0.0,
        description="where the advantage is negative, ratios above this lose no more, 3.0 is usual; 0: off",
    )
    aggregation: Literal["token-mean", "sequence-mean", "sequence-sum"] = Field(
        default="token-mean",
        description="mean over all tokens of an update; over sequences of each one's mean; or of each one's sum / rl.aggregation_length",
    )
    aggregation_length: NonNegative = Field(default=0, description="Dr.GRPO's constant that sequence-sum divides by, in tokens")
    old_logp: Literal["auto", "scored"] = Field(
        default="auto",
        description="auto: an on-policy update takes the current log-prob as the old one, ratio 1; scored: always a pass of its own, "
        "which lets the noise of two passes into the ratio",
    )
    router_replay: Literal["none", "engine", "scored"] = Field(
        default="none",
        description="whose choice of experts the trainer takes over; engine: the one each rollout was sampled with, scored: that of the "
        "pass which scores old log-probs; probabilities and gradients stay the trainer's own",
    )
    entropy_coef: float = 0.0
    kl_coef: Annotated[float, Field(ge=0)] = Field(
        default=0.0,
        description="weight of KL to the initial policy; 0: no reference is kept",
    )
    kl_in: Literal["loss", "reward"] = Field(default="loss", description="where the KL goes: into the loss, or off each token's reward")
    kl_estimator: Literal["k1", "k2", "k3", "unbiased"] = Field(
        default="k3",
        description="how KL is estimated from the sampled tokens; unbiased: k3 times the importance ratio (DeepSeek-V3.2), loss only",
    )
    correction: Literal[
        "none", "tis", "mis", "icepop", "seq-is", "seq-tis", "seq-mis", "geo-tis", "geo-mis", "geo-rs", "geo-rs-tis", "geo-rs-seq-tis"
    ] = Field(
        default="tis",
        description="how the loss makes up for log-probs that differ between trainer and engine; docs/rollout_correction.md lists them",
    )
    correction_cap: Annotated[float, Field(ge=1)] = Field(default=2.0, description="weights above it are truncated or masked")
    correction_floor: Annotated[float, Field(gt=0, le=1)] = Field(default=0.5, description="weights below it are masked (icepop, geo-mis)")
    reject_low: Annotated[float, Field(gt=0, le=1)] = Field(default=0.999, description="geo-rs: least geometric ratio of a sequence")
    reject_high: Annotated[float, Field(ge=1)] = Field(default=1.001, description="geo-rs: largest geometric ratio of a sequence")
    correction_veto: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0,
        description="a token whose trainer/engine ratio is below this rejects its sequence, 1e-4 is usual; 0: off",
    )
    correction_normalize: bool = Field(
        default=False,
        description="divide weights by their mean over the update; an on-policy update then scores first",
    )
    max_unusable_fraction: Probability = Field(
        default=0.001,
        description="share of trained tokens with an infinite or NaN log-prob above which the run stops; below it they are masked",
    )

    @property
    def has_critic(self) -> bool:
        return self.advantage == "gae"

    @property
    def credited(self) -> Literal["sequence", "turn", "token"]:
        """What `credit` comes to."""
        if self.credit == "auto":
            return "token" if self.has_critic else "sequence"
        return self.credit

    @property
    def leaves_out_uniform_groups(self) -> bool:
        """Only where equal rewards make every advantage 0. A critic and reinforce++ compare no rollouts of a group, and KL in the reward
        and a discount tell rollouts of equal reward apart."""
        compares = self.advantage not in ("gae", "reinforce++")
        only_rewards_count = self.gamma == 1.0 and not (self.kl_coef > 0.0 and self.kl_in == "reward")
        return self.drop_uniform_groups and compares and only_rewards_count


class RolloutConfig(Section):
    group_size: Positive = 8
    temperature: Annotated[float, Field(gt=0)] = 1.0
    max_turns: Positive = 5
    max_turn_tokens: Positive = 28
    max_sequence_tokens: Positive = 200
    max_lag_steps: NonNegative = Field(
        default=0,
        description="steps that rollouts may run ahead of training: no token is trained by a policy more versions newer than this. 0: they "
        "wait for each other (docs/overlap.md)",
    )
    num_engines: Positive = 1
    tensor_parallel: Positive = Field(default=1, description="GPUs of one engine, which divide its model; on a CPU processes")
    max_running: Positive = Field(default=64, description="sequences an engine decodes at once")
    max_in_flight: Annotated[int, Field(ge=0, le=MOST_IN_FLIGHT)] = Field(
        default=0,
        description="turns an engine is given at once, so that the next ones lie ready in it; the rest waits outside, first come first "
        "served; 0: twice max_running",
    )
    deterministic: bool = Field(default=False, description="a seed per request and one sequence at a time: slow, bit-reproducible")
    dtype: Literal["float32", "bfloat16"] = "float32"
    kv_cache_gib: Annotated[float, Field(gt=0)] = Field(default=1.0, description="KV cache of a CPU engine")
    gpu_memory_fraction: Probability = Field(default=0.85, description="share of a GPU that an engine may take")
    gpu_kv_cache_gib: Annotated[float, Field(ge=0)] = Field(
        default=0.0,
        description="KV cache of a GPU engine; 0: what gpu_memory_fraction leaves, found by measuring free memory, which goes wrong while "
        "other programs start on the same GPU",
    )
    weight_sync: Literal["auto", "inline", "broadcast", "shared"] = Field(
        default="auto",
        description="how engines are given new weights; inline: inside calls, with a whole copy in host memory; broadcast: in buckets over "
        "NCCL, or Gloo without GPUs; shared: in buckets through memory that trainer and engine both have; auto: inline without GPUs, "
        "shared with cluster.share_gpus, else broadcast",
    )
    weight_bucket_mib: Annotated[float, Field(gt=0)] = Field(
        default=1024.0,
        description="tensors that travel together; a sender holds two such buckets, a receiver of broadcasts too; one tensor may be more",
    )
    start_timeout_s: Seconds = 300.0
    turn_timeout_s: Seconds = Field(
        default=120.0,
        description="deadline for one assistant turn from the moment an engine is given it, and for a weight update",
    )
    probe_every_s: Seconds = Field(default=10.0, description="pause between two questions whether all processes of an engine are alive")
    probe_timeout_s: Seconds = Field(
        default=60.0,
        description="deadline for the answer, then the engine is replaced; longer than its longest step, since it answers between two",
    )
    max_restarts: NonNegative = Field(
        default=4,
        description="times dead engines are brought back, all of them together, within any restart_window_s; one more ends the run",
    )
    restart_window_s: Seconds = Field(default=3600.0, description="restarts longer ago do not count for max_restarts")


class TrainerConfig(Section):
    dtype: Literal["float32", "bfloat16"] = "float32"
    attention: AttentionBackend = Field(
        default="reference",
        description="what computes attention; reference: plain PyTorch, triton: our kernels, flash: flash-attn-4, te: TransformerEngine",
    )
    attention_windowed: Literal["same", "reference", "triton", "flash", "te"] = Field(
        default="same",
        description="what computes it in layers with a sliding window; same: what trainer.attention says",
    )
    deterministic_attention: bool = Field(
        default=False,
        description="attention's gradients have the same bits every time; slower on a GPU, and not every backend can",
    )
    transformer: Literal["local", "te"] = Field(
        default="local",
        description="whose layers the model is made of; local: Megatron's own, te: TransformerEngine's",
    )
    experts: Literal["loop", "grouped"] = Field(
        default="loop",
        description="how a rank computes its experts; loop: one after another, grouped: all in one grouped matrix product (GPU)",
    )
    rotary: Literal["reference", "fused"] = Field(
        default="reference",
        description="what splits queries, keys and values and rotates the first two; reference: plain PyTorch, fused: our kernel (GPU)",
    )
    dispatcher: Literal["alltoall", "deepep"] = Field(
        default="alltoall",
        description="what carries tokens to the ranks of their experts; deepep: the DeepEP library, when it is installed",
    )
    logprob: Literal["reference", "fused"] = Field(
        default="reference",
        description="what computes log-probs; reference: plain PyTorch, fused: our kernels, with the vocabulary divided over tensor ranks",
    )
    recompute: Literal["none", "selective", "full"] = Field(
        default="none",
        description="what backward computes again instead of keeping it; selective: the mixture of experts, full: every layer",
    )
    optimizer_states: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="AdamW's two moments, rounded stochastically to bfloat16; the master weights stay float32 either way",
    )
    optimizer_offload: Probability = Field(
        default=0.0,
        description="share of the optimizer (master weights, moments) that lives in host memory and is updated there, by threads_per_rank",
    )
    tokens_per_microbatch: Positive = Field(
        default=8192,
        description="tokens packed into one forward and backward pass, over all the ranks that share it (tensor and context)",
    )
    logprob_chunk: Positive = Field(default=1024, description="predicted tokens whose logits exist at once")
    threads_per_rank: Positive = Field(default=1, description="CPU threads of one trainer rank; part of the numerics")
    max_skipped_updates: Positive = Field(
        default=3,
        description="consecutive updates skipped for values that are not finite before the run ends",
    )
    step_timeout_s: Seconds = Field(default=600.0, description="deadline for scoring, updating or saving")

    @property
    def backend_of_windowed_layers(self) -> AttentionBackend:
        return self.attention if self.attention_windowed == "same" else self.attention_windowed


class ParallelConfig(Section):
    """Degrees of the training world. Its ranks are tensor x context x pipeline x data; experts are divided inside a pipeline stage."""

    tensor: Positive = Field(default=1, description="ranks that share every matrix of attention and the vocabulary (sequence-parallel too)")
    context: Positive = Field(default=1, description="ranks that share the tokens of a microbatch")
    pipeline: Positive = Field(default=1, description="stages the layers are divided over")
    pipeline_layers: str = Field(
        default="",
        pattern=r"^([0-9]+(,[0-9]+)*)?$",
        description="layers of each stage, first to last; empty: balanced, fewer where the embedding and the output head are",
    )
    data: Positive = Field(default=1, description="groups of ranks that see different samples")
    expert: Positive = Field(default=1, description="ranks the experts are divided over; divides tensor x context x data")
    expert_imbalance: Annotated[float, Field(ge=1)] = Field(
        default=1.25,
        description="rows of the busiest expert-parallel rank over the mean, as the memory plan assumes; changes nothing that is computed",
    )


class EvalConfig(Section):
    """`gptoss eval`: several rollouts of each held-out prompt, sampled as [rollout] says. The evaluations of `gptoss train` are [run]'s."""

    prompts: Positive = Field(default=300, description="held-out prompts; all of them where the task has fewer")
    samples_per_prompt: Positive = Field(default=4, description="rollouts of each prompt")
    k: str = Field(
        default="",
        pattern=r"^([1-9][0-9]*(,[1-9][0-9]*)*)?$",
        description="the k of pass@k, with commas; empty: 1, 2, 4, … up to eval.samples_per_prompt",
    )
    success_reward: float = Field(default=1.0, description="pass@k counts a rollout as a success when its reward is at least this")
    success_label: str = Field(
        default="",
        description="what counts instead: that the task gave the rollout this label, such as right; empty: the reward decides",
    )

    @property
    def ks(self) -> tuple[int, ...]:
        """What `k` comes to, ascending."""
        if self.k:
            return tuple(sorted({int(word) for word in self.k.split(",")}))
        return tuple(2**i for i in range(self.samples_per_prompt.bit_length()))


class ParityConfig(Section):
    """The self-test before the first step: trainer and engine on the same tokens (docs/self_test.md)."""

    enabled: bool = True
    max_abs_gap: Annotated[float, Field(gt=0)] = Field(default=1e-4, description="largest log-prob gap allowed at any position, nats")
    max_mean_gap: Annotated[float, Field(ge=0)] = Field(
        default=0.0,
        description="largest mean of the gap over all compared tokens, nats; 0: no limit. In bfloat16 it sees what single tokens hide",
    )
    perturb: str = Field(
        default="no-sinks,window,yarn-rounded,router-bias",
        pattern=rf"^({'|'.join(PERTURBATIONS)})(,({'|'.join(PERTURBATIONS)}))*$|^$",
        description="comma-separated faults that the trainer is given one at a time when it agrees with the engine; each must move its "
        "log-probs by more than the two limits allow, or the comparison is blind to it and the run does not start; empty: none",
    )
    reference_gib: Annotated[float, Field(ge=0)] = Field(
        default=8.0,
        description="memory for one layer in float32, on each trainer rank, when the pieces of a trainer that disagrees are compared with "
        "the reference; where a layer needs more they are not",
    )
    trainer_fault: TrainerFault = Field(
        default="none",
        description="break the trainer on purpose, to see the self-test refuse",
    )


class DiagnoseConfig(Section):
    """Switches that take one part of the model out of training, to find where a fault comes from. All off in a run that is to be believed.

    ignore_sinks and ignore_window make another model of the trainer than the engines have, so the parity check refuses to begin
    `gptoss train` with them, unless parity.enabled is false.
    """

    ignore_sinks: bool = Field(default=False, description="attention without sinks, as if each were minus infinity")
    drop_sink_gradient: bool = Field(default=False, description="the forward pass has its sinks, but they are not trained")
    ignore_window: bool = Field(default=False, description="windowed layers see all earlier tokens, as the other layers do")
    freeze_attention: bool = Field(
        default=False,
        description="no weight of attention is trained: qkv, projection, sinks, and the norm before them",
    )
    freeze_experts: bool = Field(default=False, description="no weight or bias of an expert is trained")
    freeze_router: bool = Field(default=False, description="no weight or bias of a router is trained")
    routing_noise: Annotated[float, Field(ge=0)] = Field(
        default=0.0,
        description="standard deviation of noise on the router's logits that only its choice of experts sees, new in each forward pass of "
        "the trainer: what rounding does that differs from pass to pass, made large; 0: none",
    )


class ClusterConfig(Section):
    address: str = Field(default="local", description="Ray cluster to join; local: start one for this run")
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="what trainer ranks and engines compute on; cuda: one GPU for each")
    nodes: NonNegative = Field(default=0, description="nodes of the Ray cluster that the run waits for; 0: as many as its GPUs need")
    gpus_per_node: Positive = 8
    gpu_memory_gib: Annotated[float, Field(gt=0)] = Field(
        default=139.8,
        description="memory of one GPU as PyTorch sees it; a plan that needs more is refused. 139.8: an H200",
    )
    host_memory_gib: Annotated[float, Field(gt=0)] = Field(
        default=1900.0,
        description="a GPU node's own memory that trainer ranks may use, for optimizers on the host and checkpoints on their way to disk",
    )
    share_gpus: bool = Field(
        default=False,
        description="engines on the trainer's GPUs, of which each takes rollout.gpu_memory_fraction; false: on GPUs of their own",
    )
    first_port: Annotated[int, Field(ge=1024, le=65535)] = 29500
    num_ports: Positive = Field(default=100, description="ports from first_port on that may be taken for the trainer's rendezvous")


class Config(Section):
    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    task: TaskConfig = TaskConfig()
    sft: SftConfig = SftConfig()
    rl: RlConfig = RlConfig()
    rollout: RolloutConfig = RolloutConfig()
    trainer: TrainerConfig = TrainerConfig()
    parallel: ParallelConfig = ParallelConfig()
    eval: EvalConfig = EvalConfig()
    parity: ParityConfig = ParityConfig()
    diagnose: DiagnoseConfig = DiagnoseConfig()
    cluster: ClusterConfig = ClusterConfig()
