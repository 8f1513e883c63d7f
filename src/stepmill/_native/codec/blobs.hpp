// The parts of a command without a fixed size: options of a reset, opaque actions. A small blob is stored in its server's row of the
// slab, a large one in the worker's command memfd. The pool writes a blob while the server is idle; the worker reads it. Needs no Python.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "codec/overflow.hpp"
#include "shared/slab.hpp"

namespace stepmill {

constexpr std::uint64_t BLOB_IN_ROW = UINT64_MAX;  // as the offset of a blob: it is in the server's row

// Writes a blob that fits in the row, without a system call. Returns false if it does not fit.
inline bool write_small_blob(const Slab& slab, std::uint32_t server, std::span<const std::uint8_t> bytes) noexcept {
    if (bytes.size() > slab.plan.blob.row_bytes) return false;
    const ServerLocation location = slab.server_locations[server];
    const ServerWords& words = slab.words[location.worker];
    std::memcpy(slab.blob(server), bytes.data(), bytes.size());
    words.blob_offset[location.local] = BLOB_IN_ROW;
    words.blob_bytes[location.local] = bytes.size();
    return true;
}

// Copies the blob of a command into `out`. Returns false, and clears `out`, if the words point to no valid blob.
[[nodiscard]] inline bool read_blob_bytes(const Slab& slab, std::uint32_t worker, std::uint32_t local, std::vector<std::uint8_t>& out) {
    const ServerWords& words = slab.words[worker];
    const OverflowRef ref{words.blob_offset[local], words.blob_bytes[local], words.blob_generation[local]};
    if (ref.offset != BLOB_IN_ROW) return read_overflow(slab.command_fds.at(worker), ref, out);
    out.clear();
    if (ref.size > slab.plan.blob.row_bytes) return false;
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(slab.blob(slab.plan.servers[worker][local]));
    out.assign(bytes, bytes + ref.size);
    return true;
}

}  // namespace stepmill
