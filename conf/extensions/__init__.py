"""Parts that users add without editing the repository: registered, loaded, checked, put to use."""
