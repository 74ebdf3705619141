"""What to try where a policy is at fault, in the terms of PPO, GRPO and their libraries."""

from steadystep.diagnosis.causes import Cause, Remedy, Tip

_LOWER = Tip("lower the learning rate", Remedy.LOWER_RATE)
_BACK = Tip("roll back to an earlier checkpoint", Remedy.ROLL_BACK)

POLICY_TIPS: dict[Cause, tuple[Tip, ...]] = {
    Cause.POLICY_DRIFT: (
        Tip("raise the KL coefficient (beta, kl_loss_coef), or take fewer updates per batch of rollouts"),
        _LOWER,
        Tip("the samples of these steps show whether the reward is being gamed"),
    ),
    Cause.ENTROPY_COLLAPSE: (
        Tip(
            "raise the upper clip range only (clip-higher: epsilon_high 0.28), add an entropy bonus, or raise the "
            "sampling temperature or the KL coefficient"
        ),
        _LOWER,
        _BACK,
    ),
    Cause.RATIO_EXPLOSION: (
        Tip("take fewer epochs or larger minibatches per batch of rollouts, or stop them early (target_kl)"),
        _LOWER,
        Tip("check that old log-probabilities are those of the sampled tokens, at the same temperature and mask"),
    ),
    Cause.POLICY_MISMATCH: (
        Tip(
            "correct with truncated importance weights (TRL vllm_importance_sampling_correction, verl "
            "rollout_correction, NeMo-RL use_importance_sampling_correction)"
        ),
        Tip("sync the sampler's weights before each batch, and compare its temperature, top-p and tokenization"),
        Tip("run sampler and learner in the same precision: fp16 for both leaves a smaller gap than bf16"),
    ),
    Cause.REWARD_HACKING: (
        Tip("read samples of these steps: the reward pays for something else than it should; fix or mix the reward"),
        Tip("raise the KL coefficient, and penalize length where responses grow (overlong penalty)"),
        Tip("keep the checkpoint with the best held-out reward", Remedy.ROLL_BACK),
    ),
    Cause.DEAD_GROUPS: (
        Tip(
            "groups with equal rewards give no gradient: filter them and sample again (dynamic sampling), use larger "
            "groups, or prompts whose success rate is neither 0 nor 1"
        ),
    ),
    Cause.VALUE_DIVERGENCE: (
        Tip("lower the critic's learning rate, normalize returns or rewards, and clip value targets"),
        Tip("with bootstrapping: update the target network more slowly, use the smaller of two critics"),
    ),
    Cause.POLICY_COLLAPSE: (
        _BACK,
        Tip("lower the learning rate or raise the KL coefficient", Remedy.LOWER_RATE),
        Tip("use larger batches: advantages of few samples are mostly noise"),
        Tip("give the guard rollouts to compare policies with (steadystep.rl.Controls), so that it can roll back"),
    ),
    Cause.FLAT_REWARD: (
        Tip(
            "a constant reward teaches nothing: check that the reward function reads the completions, and that within "
            "a group some attempts succeed and some fail (easier prompts, larger groups)"
        ),
    ),
}
"""What to change for each cause that lies in the policy."""
