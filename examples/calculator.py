"""An environment: the policy may ask for a product, then it answers."""

MULTIPLY = {
    "name": "multiply",
    "description": "Multiply two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


class Calculator:
    """The first call pays 0.1, the right answer 1."""

    tools = ({"type": "function", "function": MULTIPLY},)

    def reset(self, row):
        """Begin with the messages of the row."""
        self.answer, self.call_reward = row["ground_truth"], 0.1

    def step(self, message):
        """Return messages, whether the episode is over, and the reward by parts."""
        if "error" in message:
            return message["error"], False, None
        if "tool_calls" not in message:
            return None, True, {"right": float(message["content"] == self.answer)}
        try:
            numbers = message["tool_calls"][0]["function"]["arguments"]
            result = numbers["a"] * numbers["b"]
        except (KeyError, TypeError):
            return "Call multiply with the numbers a and b.", False, None
        reward, self.call_reward = {"call": self.call_reward}, 0.0
        return [{"role": "tool", "content": str(result)}], False, reward
