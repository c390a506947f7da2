"""Products of whole numbers of 16 bits: F16 and BF16 matrices, and activations that need two bytes.

`words` says what a word is, `word_gemm` multiplies matrices of words, `plane_word_gemm` quantised
ones, and `seven_products` matrices of words and many tokens, combined by `combined_panels`, in
fewer products, which `quad_products` writes.
"""
