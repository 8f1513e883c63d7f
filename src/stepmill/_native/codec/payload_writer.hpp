// Where the payload of a result goes: to its payload row, or to overflow memory if it does not fit there.
#pragma once

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
        : slab_(slab), words_(slab.words.at(worker)), overflow_(slab.result_fds.at(worker), slab.plan.servers.at(worker).size()) {}

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

}  // namespace stepmill
