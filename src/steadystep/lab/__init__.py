"""Reference tasks and the experiments behind every number we publish. Everything runs offline."""
