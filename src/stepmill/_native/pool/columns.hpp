// Columns of the slab copied into arrays of a batch.
// For files that define NO_IMPORT_ARRAY.
#pragma once

#include <algorithm>
#include <cstring>

#include "pool/pool_state.hpp"

namespace stepmill {

// NumPy requires bools to be 0 or 1. A worker may have written any byte there.
inline void normalize_bools(const Leaf& leaf, std::byte* bytes, std::size_t size) {
    if (leaf.type_num != NPY_BOOL) return;
    for (std::size_t i = 0; i < size; ++i) bytes[i] = bytes[i] != std::byte{0} ? std::byte{1} : std::byte{0};
}

inline nb::object PoolState::gather_rows(const Leaf& leaf, const Ids& ids) const {
    nb::object array = checked(new_array(leaf, static_cast<npy_intp>(ids.size() * batch_size_)));
    gather_into(leaf, ids, 0, data_of<std::byte>(array));
    return array;
}

}  // namespace stepmill
