"""What tests share: tiny models, planted data, chat templates, child processes."""
