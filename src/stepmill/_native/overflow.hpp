// Overflow memory: results and commands too big for their row, in a growable memfd that the row points into.
//
//   memfd   | region of server 2 | (punched hole) | region of server 0 | region of server 2, grown | ...
//            ^ page-aligned       16-byte header (generation, size), then the data
//
// One writer (the worker for results, the pool for command blobs), any number of readers in other processes. Readers use
// pread, never a mapping: a file that shrinks or lies gives an error, never SIGBUS. No Python here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace stepmill {

// Where one value lies; what a row carries. Size 0 is legal. Generation 0 is never written: it marks an empty row.
struct OverflowRef {
  std::uint64_t offset{0};
  std::uint64_t size{0};
  std::uint64_t generation{0};
};

// Writes values into a memfd that it does not own. Used by one thread at a time, no GIL needed. A server's value stays
// readable until the same server's next write: the ticket protocol says that nobody reads then.
class OverflowWriter {
 public:
  OverflowWriter(int fd, std::size_t num_servers);

  // Copy `size` bytes into the server's region (moved to the end of the file, with double the capacity, when it has
  // outgrown the old one). Returns 0, or the errno of the system call that failed; `ref` is then unchanged.
  [[nodiscard]] int write(std::size_t server, const std::uint8_t* data, std::uint64_t size, OverflowRef& ref);

  std::uint64_t end_bytes() const { return end_; }  // the file is never longer than this

 private:
  struct Region {
    std::uint64_t offset{0};
    std::uint64_t capacity{0};  // bytes with header, whole pages; 0: no region yet
    std::uint64_t resident{0};  // bytes from `offset` that may hold memory, whole pages
  };

  void grow(Region& region, std::uint64_t needed);
  void trim(Region& region, std::uint64_t used) const;

  int fd_;
  std::uint64_t end_;
  std::uint64_t generation_{0};
  std::vector<Region> regions_;
};

// Copy the value at `ref` into `out`. False, with `out` empty: the file is shorter than that, or holds another
// generation or size at that place. Allocates nothing before the file's own size vouches for `ref`.
[[nodiscard]] bool read_overflow(int fd, const OverflowRef& ref, std::vector<std::uint8_t>& out);

}  // namespace stepmill
