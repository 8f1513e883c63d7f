// Overflow memory: results and commands too big for their row lie in a growable memfd that the row points into.
//
//   memfd   | region of server 2 | (punched hole) | region of server 0 | region of server 2, grown | ...
//             each: whole pages; a header (generation, size), then the value
//
// One writer (a worker for results, the pool for commands), readers in other processes. They use pread and never map:
// a file that is shorter than a row says is an error to them, not a SIGBUS. Knows no Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace stepmill {

// Where one value lies: what a row carries.
struct OverflowRef {
    std::uint64_t offset{0};
    std::uint64_t size{0};        // in bytes
    std::uint64_t generation{0};  // grows with every write; 0 in a reader's hand: any generation will do
};

// Writes values into a memfd that somebody else owns. For one thread at a time; needs no GIL. A server's value can be
// read until that server's next write: the ticket protocol says that nobody reads then.
class OverflowWriter {
   public:
    // Begins at the file's end: what a dead writer left can still be read.
    OverflowWriter(int fd, std::size_t num_servers);

    // Copies the value into the server's region, which moves to the end of the file and at least doubles when it is too
    // small. Returns 0, or the errno of the call that failed, and then `ref` is as it was.
    [[nodiscard]] int write(std::size_t server, const std::uint8_t* data, std::uint64_t size_bytes, OverflowRef& ref);

    std::uint64_t end_bytes() const { return end_bytes_; }  // no region lies behind this

   private:
    struct Region {
        std::uint64_t offset{0};
        std::uint64_t capacity_bytes{0};
        std::uint64_t resident_bytes{0};  // from `offset`; behind that the region holds no memory
    };

    void grow(Region& region, std::uint64_t needed_bytes);
    void trim(Region& region, std::uint64_t used_bytes) const;

    int fd_;
    std::uint64_t end_bytes_{0};
    std::uint64_t generation_{0};
    std::vector<Region> regions_;
};

// Gives back the memory of everything in the file but these values: of a writer that is gone. References are not trusted.
void free_all_but(int fd, std::vector<OverflowRef> kept);

// Copies the value at `ref` into `out`. False, and `out` empty: the file is too short, or another value lies there.
// Allocates nothing before the file has vouched for the size.
[[nodiscard]] bool read_overflow(int fd, const OverflowRef& ref, std::vector<std::uint8_t>& out);

}  // namespace stepmill
