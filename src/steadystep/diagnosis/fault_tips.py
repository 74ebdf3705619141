"""What to try for a particular mistake: told instead of the advice for its cause."""

from steadystep.diagnosis.causes import Fault, Tip

FAULT_TIPS: dict[Fault, tuple[Tip, ...]] = {
    Fault.FROZEN_PARAMETERS: (
        Tip("set requires_grad = True for what should learn, and give its parameter group a learning rate above 0"),
        Tip("what is frozen on purpose needs no change"),
    ),
    Fault.WRONG_OPTIMIZER_PARAMS: (
        Tip("build the optimizer from model.parameters() once every layer is in place"),
        Tip("use optimizer.add_param_group for layers that are added or replaced later"),
    ),
    Fault.CONSTANT_TARGETS: (
        Tip("print the targets of a few batches: check the column they come from, casts, thresholds and masks"),
    ),
    Fault.ALL_IGNORED_TARGETS: (
        Tip("check the mask that writes ignore_index: after truncation or prompt masking it covers every target"),
    ),
    Fault.LABELS_SHUFFLED: (
        Tip("shuffle inputs and targets with one permutation, read them in the same order, and look at ten pairs"),
    ),
    Fault.UNSCALED_TARGETS: (
        Tip("scale the targets to mean 0 and standard deviation 1, or take logarithms, and undo it for predictions"),
    ),
    Fault.TARGET_LEAK: (
        Tip("remove the target, and whatever is computed from it, from the inputs"),
        Tip("for sequences check the causal mask and the shift by one"),
    ),
    Fault.CONSTANT_INPUTS: (
        Tip("print the inputs of a few batches: check the index of the dataset and the statistics they are divided by"),
    ),
    Fault.UNSHUFFLED_DATA: (
        Tip("shuffle: DataLoader(..., shuffle=True), or a shuffle buffer for an iterable dataset"),
    ),
    Fault.WRONG_LOSS: (
        Tip("give cross_entropy and ..._with_logits raw scores, and binary_cross_entropy and nll_loss probabilities"),
        Tip("check that outputs and targets have the same shape, and that lower means better"),
    ),
    Fault.SOFTMAX_AXIS: (
        Tip("take the softmax over the classes (dim=-1), and none before cross_entropy"),
        Tip("use a sigmoid for a single unit"),
    ),
    Fault.OUTPUT_INDEPENDENT_OF_INPUT: (
        Tip(
            "follow one input through the model: look for a tensor that is overwritten, multiplied by zero, saturated, "
            "or averaged over all samples"
        ),
    ),
    Fault.BATCH_DEPENDENCE: (
        Tip("check each view, mean, softmax and normalization: the batch dimension must stay out of it"),
    ),
    Fault.REGULARISATION_TOO_STRONG: (
        Tip(
            "divide weight decay, dropout and penalties by 10 and compare; a penalty that is a sum grows with the model"
        ),
    ),
    Fault.PRECISION: (
        Tip("keep weights and optimizer state in float32 and use torch.autocast, with a loss scaler for float16"),
    ),
    Fault.EVAL_MODE: (Tip("call model.train() before the loop, and again after each evaluation"),),
}
"""By fault, in the order in which they are given."""
