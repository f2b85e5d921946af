"""Where prompts come from, and the cursor that a restart resumes."""
