// Overflow memory: results and commands that do not fit in their row are stored in a growable memfd, to which the row refers.
//
//   memfd   | region of server 2 | (punched hole) | region of server 0 | region of server 2, grown | ...
// each: whole pages; a header (generation, size), then the value
//
// One process writes (a worker its results, the pool its commands), others read. Readers use pread and never map the file:
// if it is shorter than a row says, they get an error and no SIGBUS. Needs no Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace stepmill {

// The location of one value; a row contains it.
struct OverflowRef {
    std::uint64_t offset{0};
    std::uint64_t size{0};        // in bytes
    std::uint64_t generation{0};  // grows with every write; 0 given to a reader: any generation
};

// Writes values into a memfd that it does not own. For one thread at a time; needs no GIL. A value can be read until the next write
// for the same server; the ticket protocol ensures that nobody reads then.
class OverflowWriter {
   public:
    // Begins at the end of the file, so that the values of a dead writer stay readable.
    OverflowWriter(int fd, std::size_t num_servers);

    // Copies the value into the server's region. If the region is too small, it moves to the end of the file and at least doubles.
    // Returns 0, or the errno of the failed call; `ref` is then unchanged.
    [[nodiscard]] int write(std::size_t server, const std::uint8_t* data, std::uint64_t size_bytes, OverflowRef& ref);

    std::uint64_t end_bytes() const { return end_bytes_; }  // the end of the last region

   private:
    struct Region {
        std::uint64_t offset{0};
        std::uint64_t capacity_bytes{0};
        std::uint64_t resident_bytes{0};  // from `offset`; the rest of the region has no memory
    };

    void grow(Region& region, std::uint64_t needed_bytes);
    void trim(Region& region, std::uint64_t used_bytes) const;

    int fd_;
    std::uint64_t end_bytes_{0};
    std::uint64_t generation_{0};
    std::vector<Region> regions_;
};

// Frees the memory of everything in the file except these values. For files without a writer. References are not trusted.
void free_all_but(int fd, std::vector<OverflowRef> kept);

// Copies the value at `ref` into `out`. Returns false, and clears `out`, if the file is too short or has another value there.
// Checks the size against the file before it allocates.
[[nodiscard]] bool read_overflow(int fd, const OverflowRef& ref, std::vector<std::uint8_t>& out);

}  // namespace stepmill
