"""What tests of Pion and of its users start: real servers."""
