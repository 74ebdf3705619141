"""One name for each RL metric, and its names in TRL, verl, NeMo-RL, OpenRLHF, stable-baselines3 and CleanRL.

No torch: logs are read with it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, final

Worse = Literal["higher", "lower", "either"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A metric of a policy."""

    name: str
    """Canonical name."""
    meaning: str
    """What it is."""
    worse: Worse
    """The direction that is a sign of trouble."""
    aliases: tuple[str, ...] = ()
    """Names in other libraries, in lower case; a leading "train/" is optional, `*` stands for anything."""


METRICS: tuple[Metric, ...] = (
    Metric(
        name="reward",
        meaning="mean reward of the batch, or mean return of its episodes",
        worse="lower",
        aliases=(
            *("rewards", "mean_reward", "reward/mean", "reward_mean", "rewards/mean", "objective/scores"),
            *("critic/score/mean", "rollout/ep_rew_mean", "ep_rew_mean"),
            *("charts/episodic_return", "episodic_return", "episode_return", "return", "rewards/margins"),
        ),
    ),
    Metric(
        name="reward_std",
        meaning="standard deviation of the reward (in GRPO inside a group)",
        worse="lower",
        aliases=("rewards/std", "reward/std", "group_reward_std", "critic/score/std"),
    ),
    Metric(
        name="held_out_reward",
        meaning="reward on held-out prompts, or by a grader that is not trained against",
        worse="lower",
        aliases=(
            *("eval_reward", "eval/reward", "eval/mean_reward", "val/reward", "validation/reward"),
            *("validation/accuracy", "eval/accuracy", "val-core/*", "val/test_score/*", "eval_rewards/margins"),
            *("rollout/success_rate", "gold_reward"),
        ),
    ),
    Metric(
        name="adjusted_reward",
        meaning="reward less the KL penalty",
        worse="lower",
        aliases=("objective/rlhf_reward", "critic/rewards/mean"),
    ),
    Metric(
        name="entropy",
        meaning="mean entropy of the policy per token or action, in nats",
        worse="lower",
        aliases=(
            *("policy_entropy", "actor/entropy", "actor/entropy_loss", "entropy_loss", "objective/entropy"),
            *("policy/entropy_avg", "losses/entropy", "approx_entropy", "entropy/mean", "mean_entropy"),
        ),
    ),
    Metric(
        name="kl_ref",
        meaning="KL divergence to the reference policy",
        worse="higher",
        aliases=(
            *("kl", "objective/kl", "actor/kl_loss", "actor/reward_kl_penalty", "critic/kl", "kl_loss", "kl_penalty"),
            *("ref_kl", "reference_kl", "kl_ref/mean"),
        ),
    ),
    Metric(
        name="kl_old",
        meaning="KL divergence to the policy that drew the samples",
        worse="higher",
        aliases=(
            *("approx_kl", "approxkl", "actor/ppo_kl", "ppo_kl", "policy/approxkl_avg", "losses/approx_kl"),
            *("policy_kl_error", "mean_kl"),
        ),
    ),
    Metric(
        name="ratio_mean",
        meaning="mean importance ratio of the policy against the one that drew the samples",
        worse="either",
        aliases=("ratio", "val/ratio", "probs_ratio", "importance_ratio", "actor/ratio_mean"),
    ),
    Metric(
        name="ratio_max",
        meaning="largest importance ratio",
        worse="higher",
        aliases=("probs_ratio_max", "actor/ratio_max", "ratio/max", "importance_ratio/max"),
    ),
    Metric(
        name="clip_fraction",
        meaning="share of tokens or actions whose gradient is cut by the ratio clip",
        worse="higher",
        aliases=(
            *("clip_ratio/region_mean", "clip_ratio", "actor/pg_clipfrac", "clipfrac", "pg_clipfrac"),
            *("policy/clipfrac_avg", "losses/clipfrac", "ppo_clip_ratio", "clip_frac"),
        ),
    ),
    Metric(
        name="mismatch",
        meaning="mean absolute difference of log-probabilities, sampler against learner",
        worse="higher",
        aliases=(
            *("sampling/sampling_logp_difference/mean", "training/rollout_probs_diff_mean", "token_mult_prob_error"),
            *("mismatch/mean", "rollout_corr/log_ppl_abs_diff", "mis/mean_abs_diff"),
        ),
    ),
    Metric(
        name="mismatch_tail",
        meaning="99th percentile of that difference (the maximum where a library logs only that)",
        worse="higher",
        aliases=("sampling/sampling_logp_difference/max", "training/rollout_probs_diff_max", "mismatch/p99"),
    ),
    Metric(
        name="mismatch_kl",
        meaning="KL divergence of the learner's policy to the sampler's",
        worse="higher",
        aliases=("gen_kl_error", "rollout_corr/kl", "rollout_corr/k3_kl", "vllm_kl", "mismatch/kl", "mismatch_k3_kl"),
    ),
    Metric(
        name="ess",
        meaning="effective sample size of the sampler's tokens under the learner, as a share",
        worse="lower",
        aliases=("rollout_corr/rollout_is_eff_sample_size", "effective_sample_size", "ess_ratio"),
    ),
    Metric(
        name="advantage_std",
        meaning="standard deviation of the advantages",
        worse="either",
        aliases=("critic/advantages/std", "advantages/std", "advantages_std"),
    ),
    Metric(
        name="advantage_peak",
        meaning="largest absolute advantage",
        worse="higher",
        aliases=("critic/advantages/max", "advantages/max"),
    ),
    Metric(
        name="advantage_agreement",
        meaning="correlation of the advantages with rewards inside their group, or with returns less values",
        worse="lower",
    ),
    Metric(
        name="zero_variance_groups",
        meaning="share of groups whose rewards are all equal: they teach nothing",
        worse="higher",
        aliases=("frac_reward_zero_std", "zero_std_ratio", "batch/solve_none_or_all", "zero_variance_share"),
    ),
    Metric(
        name="explained_variance",
        meaning="1 - Var(return - value) / Var(return)",
        worse="lower",
        aliases=("critic/vf_explained_var", "losses/explained_variance", "vf_explained_var"),
    ),
    Metric(
        name="value_loss",
        meaning="mean squared error of the value function",
        worse="higher",
        aliases=("critic/vf_loss", "losses/value_loss", "critic_loss", "loss/value_avg", "vf_loss", "qf_loss"),
    ),
    Metric(
        name="value_mean",
        meaning="mean value, or mean Q of the actions taken",
        worse="higher",
        aliases=("critic/values/mean", "values", "losses/q_values", "q_values", "q_mean", "losses/qf1_values"),
    ),
    Metric(
        name="policy_loss",
        meaning="loss of the policy alone; in SAC and DDPG minus the value of its actions",
        worse="either",
        aliases=("actor_loss", "losses/actor_loss", "actor/pg_loss", "losses/policy_loss", "policy_gradient_loss"),
    ),
    Metric(
        name="response_length",
        meaning="mean length of a response or an episode",
        worse="either",
        aliases=(
            *("completions/mean_length", "response_length/mean", "mean_gen_tokens_per_sample", "gen_length"),
            *("rollout/ep_len_mean", "ep_len_mean", "charts/episodic_length", "episodic_length"),
        ),
    ),
    Metric(
        name="truncated_share",
        meaning="share of responses cut off at the length limit",
        worse="higher",
        aliases=(
            *("completions/clipped_ratio", "response_length/clip_ratio", "truncation_rate", "truncated"),
            *("response_clip_ratio", "truncated_ratio"),
        ),
    ),
    Metric(
        name="length_correlation",
        meaning="correlation of reward and response length inside the batch",
        worse="higher",
    ),
    Metric(
        name="grad_norm_positive",
        meaning="gradient norm of the samples with a positive advantage",
        worse="higher",
    ),
    Metric(
        name="grad_norm_negative",
        meaning="gradient norm of the samples with a negative advantage",
        worse="higher",
    ),
)

"""All metrics, each with its meaning and its names in other libraries."""

# stable-baselines3 logs the entropy times -1, NeMo-RL the mean of exp|difference|, which is 1 where nothing differs
_CONVERTED = {"train/entropy_loss": (-1.0, 0.0), "token_mult_prob_error": (1.0, -1.0)}
_EXACT = {alias: metric.name for metric in METRICS for alias in (metric.name, *metric.aliases) if "*" not in alias}
_PATTERNS = tuple(
    (re.compile(re.escape(alias).replace(r"\*", ".+")), metric.name)
    for metric in METRICS
    for alias in metric.aliases
    if "*" in alias
)


@lru_cache(maxsize=4096)
def canonical(name: str) -> str | None:
    """Return the canonical name of the metric that is logged as `name`; None for one that is not about a policy.

    >>> canonical("actor/ppo_kl"), canonical("train/approx_kl"), canonical("loss")
    ('kl_old', 'kl_old', None)
    """
    plain = name.strip().lower()
    for form in (plain, plain.removeprefix("train/"), plain.removeprefix("train_")):
        if form in _EXACT:
            return _EXACT[form]
    return next((found for pattern, found in _PATTERNS if pattern.fullmatch(plain)), None)


def translate(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return those of `metrics` that are a policy's by canonical name and in canonical units.

    Of several with one canonical name, the one that has it counts, else the first.

    >>> translate({"train/entropy_loss": -1.4, "losses/approx_kl": 0.01, "time/fps": 900.0})
    {'entropy': 1.4, 'kl_old': 0.01}
    """
    found: dict[str, float] = {}
    for name, value in metrics.items():
        short = canonical(name)
        if short is not None and (short not in found or name == short):
            factor, offset = conversion(name)
            found[short] = factor * value + offset
    if "adjusted_reward" in found:  # where it is all that is logged, it is the reward
        found.setdefault("reward", found["adjusted_reward"])
    return found


@lru_cache(maxsize=4096)
def conversion(name: str) -> tuple[float, float]:
    """Return factor and offset that bring a logged metric to the canonical unit."""
    plain = name.strip().lower()
    return _CONVERTED.get(plain) or _CONVERTED.get(plain.removeprefix("train/"), (1.0, 0.0))
