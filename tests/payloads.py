"Small payloads of a target and a draft"
from cpkv.layout import PageLayout
from cpkv.payload import Payload
from cpkv.pool import FORMATS, PayloadDims

DIMS = PayloadDims(latent=6, rope=2, index=4)
SHAPES = [((True, True, True, True), 1), ((True, False, False, True), 1), ((False, True), 0),
          ((False, False, True), 2)]  # who has an index, and how many of the last layers are a draft's

def make(cp=2, P=4, has_index=(True, False, True), draft=1, fmt="fp32", dims=DIMS) -> Payload:
    return Payload(layout=PageLayout(cp_size=cp, page_size=P), has_index=has_index, dims=dims,
                   format=FORMATS[fmt], draft_layers=draft)
