"""The honest benchmark: every method adapts the same models to the same texts, alone and behind the guard.

    attractor experiment shifts --size smoke        two CPU cores, a few minutes: every method, no conclusions
    attractor experiment shifts --size full         one GPU, an hour, in pieces as short as you like

Byte-level models are pretrained on one domain and on a mixture, and adapted to domains that they have not
seen. Every method sees the same tokens, with the same schedule; its learning rate is the best of the same
few on the validation text of one shift, and then frozen; it stops early on B's validation text; what is
reported is measured on whole test texts that nothing was chosen by. Each cell of the grid is a JSON file.
"""
