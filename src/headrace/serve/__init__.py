"""The OpenAI-compatible endpoint: agents talk to the policy through it."""
