"""`cgmerge run`: what to train, compose and measure, as steps that can stop anywhere.

Every step is one command line of this program, so that anybody can repeat it by hand. A step is
known by the digest of its words, of the files it reads and of the steps before it; what was done
under that digest is not done again.
"""
