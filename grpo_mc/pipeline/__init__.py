"""The pipeline: four modules (rollout, rewards, inference, training), the messages between them, one scheduler.

prompts -> [sampling queue] -> rollout -> rewards -> [inference queue] -> inference -> [training queue] -> training
                                                                     -> weights vN+1 -> rollout
"""
