"""Rollout engines: they sample responses from the policy and report the log-probs they sampled with."""
