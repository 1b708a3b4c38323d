"""The judgement of each rank's ring of steps: baselines, drift of the step peak, growth of the floor, and who grew."""
