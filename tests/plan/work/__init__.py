"""Operations of layers, ends and updates, counted by hand."""
