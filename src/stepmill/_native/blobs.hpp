// What of a command has no fixed size: a reset's options, opaque actions. A small value lies in its server's row of the slab;
// for a large one the worker has a command memfd. The pool writes, while the server is idle; the worker reads. Knows no Python.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "overflow.hpp"
#include "slab.hpp"

namespace stepmill {

constexpr std::uint64_t BLOB_IN_ROW = UINT64_MAX;  // as a blob's offset: it lies in the server's row

// Writes a value that fits its row, which costs no system call. False: it does not fit.
inline bool write_small_blob(const Slab& slab, std::uint32_t server, const std::vector<std::uint8_t>& bytes) noexcept {
    if (bytes.size() > slab.plan.blob.row_bytes) return false;
    const Seat seat = slab.seats[server];
    const ServerWords& words = slab.words[seat.worker];
    std::memcpy(slab.blob(server), bytes.data(), bytes.size());
    words.blob_offset[seat.local] = BLOB_IN_ROW;
    words.blob_bytes[seat.local] = bytes.size();
    return true;
}

// Copies a command's value into `out`. False, and `out` empty: there is none where the words say.
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
