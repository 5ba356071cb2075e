"""The proof that T replicas may go through a model as one batch: found out by trial, and remembered.

signature   what stands for an input in the key of a plan
probe       rows and draws that are made up for a trial
agreement   when outputs of replicas count as equal, and when that says something
mixed       what operations make of several replicas, whatever the values
indices     indices out of range, which end the process on a GPU, as errors before
masks       masks that are the same for all rows of a trial, inverted
moved       parameters moved for a while, so that no gate stands at zero
carried     what a forward leaves for the next
watch       what is followed at the actual size in train()
trial       two replicas of three rows, folded and one after another
lazy_setup  what only the first forward of a model does to it, which stays
folding     the plans for an input: a record, the trial, the check at the actual size
training    plans of training steps, which outlive updates of the parameters
"""
