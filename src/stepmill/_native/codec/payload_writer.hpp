// Where the payload of a result is: in its payload row, or in overflow memory if it does not fit there.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "codec/overflow.hpp"
#include "shared/py_ref.hpp"
#include "shared/slab.hpp"

namespace stepmill {

// Writes the payloads of one worker, in its thread, with the GIL.
class PayloadWriter {
   public:
    PayloadWriter(const Slab& slab, std::uint32_t worker)
        : slab_(slab), words_(slab.words.at(worker)), overflow_(slab.result_fds.at(worker).number(), slab.plan.servers.at(worker).size()) {}

    // Returns false with an OSError set if overflow memory cannot be written.
    [[nodiscard]] bool write(std::uint32_t local, const std::vector<std::uint8_t>& bytes) {
        if (bytes.size() <= slab_.plan.payload.row_bytes) {
            std::memcpy(slab_.payload(words_.row[local]), bytes.data(), bytes.size());
        } else {
            OverflowRef ref;
            if (const int error = overflow_.write(local, bytes.data(), bytes.size(), ref); error != 0) return set_size_error(error, bytes.size());
            words_.payload_offset[local] = ref.offset;
            words_.payload_generation[local] = ref.generation;
            words_.result[local] |= RESULT_REMOTE;
            add_to(words_.counters[local].num_spilled, 1);
        }
        words_.payload_bytes[local] = bytes.size();
        return true;
    }

   private:
    const Slab& slab_;
    ServerWords words_;
    OverflowWriter overflow_;
};

// Copies the payload of a server's newest result, which is in this row, to `out`, which workers cannot write. Returns false, and clears
// `out`, if the words point to no value in overflow memory.
[[nodiscard]] inline bool read_payload_bytes(const Slab& slab, ServerLocation location, std::size_t row, std::vector<std::uint8_t>& out) {
    const ServerWords& words = slab.words[location.worker];
    const OverflowRef ref{words.payload_offset[location.local], words.payload_bytes[location.local], words.payload_generation[location.local]};
    if ((words.result[location.local] & RESULT_REMOTE) != 0) return read_overflow(slab.result_fds.at(location.worker).number(), ref, out);
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(slab.payload(row));
    out.assign(bytes, bytes + std::min<std::uint64_t>(ref.size, slab.plan.payload.row_bytes));
    return true;
}

}  // namespace stepmill
