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

// Writes the blobs of the commands of a slab. Used by one thread.
class BlobWriter {
   public:
    explicit BlobWriter(const Slab& slab) : slab_(slab) {
        for (std::size_t worker = 0; worker < slab.plan.servers.size(); ++worker) overflow_.emplace_back(slab.command_fds.at(worker).number(), slab.plan.servers[worker].size());
    }

    // Returns 0, or an errno if there is no memory. A blob that fits in the row is written without a system call.
    [[nodiscard]] int write(std::uint32_t server, std::span<const std::uint8_t> bytes) {
        const ServerLocation location = slab_.server_locations[server];
        const ServerWords& words = slab_.words[location.worker];
        OverflowRef ref{BLOB_IN_ROW, bytes.size(), 0};
        if (bytes.size() <= slab_.plan.blob.row_bytes) std::memcpy(slab_.blob(server), bytes.data(), bytes.size());
        else if (const int error = overflow_[location.worker].write(location.local, bytes.data(), bytes.size(), ref); error != 0) return error;
        words.blob_offset[location.local] = ref.offset;
        words.blob_bytes[location.local] = ref.size;
        words.blob_generation[location.local] = ref.generation;
        return 0;
    }

   private:
    const Slab& slab_;
    std::vector<OverflowWriter> overflow_;  // by worker
};

// Copies the blob of a command into `out`. Returns false, and clears `out`, if the words point to no valid blob.
[[nodiscard]] inline bool read_blob_bytes(const Slab& slab, std::uint32_t server, std::vector<std::uint8_t>& out) {
    const auto [worker, local] = slab.server_locations[server];
    const ServerWords& words = slab.words[worker];
    const OverflowRef ref{words.blob_offset[local], words.blob_bytes[local], words.blob_generation[local]};
    if (ref.offset != BLOB_IN_ROW) return read_overflow(slab.command_fds.at(worker).number(), ref, out);
    out.clear();
    if (ref.size > slab.plan.blob.row_bytes) return false;
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(slab.blob(server));
    out.assign(bytes, bytes + ref.size);
    return true;
}

}  // namespace stepmill
