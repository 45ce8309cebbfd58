# The names of `tuna_serve.api`: each is imported from here when it is used first.

from tuna_serve.api.spaces import VerifiedCache as VerifiedCache
from tuna_serve.api.spaces import check_pack as check_pack
from tuna_serve.api.spaces import list_cache as list_cache
from tuna_serve.api.spaces import list_spaces as list_spaces
from tuna_serve.api.spaces import pack_cache as pack_cache
from tuna_serve.api.spaces import prune_cache as prune_cache
from tuna_serve.api.spaces import verify_cache as verify_cache
from tuna_serve.api.spaces import verify_pack as verify_pack
