"""The parts of judgement.py: how runs are made, repeated over seeds, and summed up."""
