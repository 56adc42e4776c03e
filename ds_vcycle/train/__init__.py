"""Training one level: learning rate, costs and records, the DeepSpeed engine, one optimizer step."""
