"""Loss scales: the policies and their rule, scaling, unscaling, differentiating."""
