"""The claims of the article that pdlab set out to verify: each decided by a check on engines that run."""
