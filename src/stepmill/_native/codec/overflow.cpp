#include "codec/overflow.hpp"

#include <algorithm>
#include <bit>
#include <cerrno>

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

namespace stepmill {

namespace {

constexpr std::uint64_t PAGE_BYTES = 4096;
constexpr std::uint64_t STAT_BLOCK_BYTES = 512;
constexpr std::uint64_t MAX_VALUE_BYTES = std::uint64_t{1} << 46;  // larger than any memory; keeps sums of offsets in range
constexpr std::uint64_t SMALL_BYTES = std::uint64_t{1} << 16;      // up to this size the reader allocates before it checks the file
constexpr std::uint64_t TRIM_BYTES = std::uint64_t{1} << 20;       // smaller regions keep their memory

struct Header {
    std::uint64_t generation;
    std::uint64_t size_bytes;
};

std::uint64_t round_to_pages(std::uint64_t size_bytes) { return (size_bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES; }

// Frees memory of the file. A failure only means that the memory is kept longer.
void punch(int fd, std::uint64_t offset, std::uint64_t size_bytes) {
    if (size_bytes == 0) return;
    [[maybe_unused]] const int result =
        fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), static_cast<off_t>(size_bytes));
}

// Whether the file contains the value. The reader allocates its size first, and a reference may be invalid.
bool is_within(int fd, const OverflowRef& ref) {
    struct stat file {};
    if (fstat(fd, &file) != 0) return false;
    const auto file_bytes = static_cast<std::uint64_t>(file.st_size);
    if (file_bytes < sizeof(Header) || ref.offset > file_bytes - sizeof(Header)) return false;
    // A sparse file can be large without memory, so also compare with the memory that it has.
    return ref.size <= file_bytes - sizeof(Header) - ref.offset && ref.size <= static_cast<std::uint64_t>(file.st_blocks) * STAT_BLOCK_BYTES;
}

// Calls `transfer(at)`, a pread or pwrite of the value from the byte `at` on, until all bytes are transferred. Returns 0 or an errno.
template <typename Transfer>
int transfer_rest(std::uint64_t at, std::uint64_t size_bytes, Transfer transfer) {
    while (at < size_bytes) {
        const ssize_t moved = transfer(at);
        if (moved < 0 && errno == EINTR) continue;
        if (moved <= 0) return moved < 0 ? errno : EIO;
        at += static_cast<std::uint64_t>(moved);
    }
    return 0;
}

// Writes header and value with one system call, which dominates the cost of a small value.
int write_both(int fd, const Header& header, const void* data, std::uint64_t size_bytes, std::uint64_t offset) {
    const iovec parts[2] = {{const_cast<Header*>(&header), sizeof header}, {const_cast<void*>(data), size_bytes}};
    ssize_t written = 0;
    do written = pwritev(fd, parts, 2, static_cast<off_t>(offset));
    while (written < 0 && errno == EINTR);
    if (written < static_cast<ssize_t>(sizeof header)) return written < 0 ? errno : EIO;
    return transfer_rest(static_cast<std::uint64_t>(written) - sizeof header, size_bytes, [&](std::uint64_t at) {
        return pwrite(fd, static_cast<const std::uint8_t*>(data) + at, size_bytes - at, static_cast<off_t>(offset + sizeof header + at));
    });
}

}  // namespace

OverflowWriter::OverflowWriter(int fd, std::size_t num_servers) : fd_(fd), regions_(num_servers) {
    struct stat file {};
    if (fstat(fd, &file) == 0) end_bytes_ = round_to_pages(static_cast<std::uint64_t>(file.st_size));
}

void OverflowWriter::grow(Region& region, std::uint64_t needed_bytes) {
    punch(fd_, region.offset, region.resident_bytes);
    region.offset = end_bytes_;
    region.capacity_bytes = std::bit_ceil(round_to_pages(needed_bytes));
    region.resident_bytes = 0;
    end_bytes_ += region.capacity_bytes;
}

// Frees most of a huge value's memory when small values follow it.
void OverflowWriter::trim(Region& region, std::uint64_t used_bytes) const {
    const std::uint64_t kept_bytes = round_to_pages(used_bytes);
    if (region.resident_bytes > TRIM_BYTES && kept_bytes < region.resident_bytes / 4) {
        punch(fd_, region.offset + kept_bytes, region.resident_bytes - kept_bytes);
        region.resident_bytes = kept_bytes;
    }
    if (region.resident_bytes < kept_bytes) region.resident_bytes = kept_bytes;
}

int OverflowWriter::write(std::size_t server, const std::uint8_t* data, std::uint64_t size_bytes, OverflowRef& ref) {
    if (size_bytes > MAX_VALUE_BYTES) return EFBIG;
    Region& region = regions_[server];
    const std::uint64_t needed_bytes = sizeof(Header) + size_bytes;
    if (needed_bytes > region.capacity_bytes) grow(region, needed_bytes);
    trim(region, needed_bytes);

    const Header header{++generation_, size_bytes};
    const int error = write_both(fd_, header, data, size_bytes, region.offset);
    if (error == 0) ref = OverflowRef{region.offset, size_bytes, header.generation};
    return error;
}

void free_all_but(int fd, std::vector<OverflowRef> kept) {
    struct stat file {};
    if (fstat(fd, &file) != 0) return;
    const auto file_bytes = static_cast<std::uint64_t>(file.st_size);
    std::ranges::sort(kept, {}, &OverflowRef::offset);
    std::uint64_t begin = 0;
    for (const OverflowRef& ref : kept) {
        if (ref.offset >= file_bytes || ref.size > file_bytes - ref.offset) continue;
        if (ref.offset > begin) punch(fd, begin, ref.offset - begin);
        begin = std::max(begin, ref.offset + sizeof(Header) + ref.size);
    }
    if (begin < file_bytes) punch(fd, begin, round_to_pages(file_bytes) - begin);  // a partly punched page is kept
}

bool read_overflow(int fd, const OverflowRef& ref, std::vector<std::uint8_t>& out) {
    out.clear();
    if (ref.offset > MAX_VALUE_BYTES || (ref.size > SMALL_BYTES && !is_within(fd, ref))) return false;
    out.resize(ref.size);
    Header header{};
    const iovec parts[2] = {{&header, sizeof header}, {out.data(), ref.size}};
    ssize_t got = 0;
    do got = preadv(fd, parts, 2, static_cast<off_t>(ref.offset));
    while (got < 0 && errno == EINTR);
    const bool is_own = got >= static_cast<ssize_t>(sizeof header) && header.size_bytes == ref.size &&
                        (ref.generation == 0 || header.generation == ref.generation);
    const auto read_rest = [&](std::uint64_t at) { return pread(fd, out.data() + at, ref.size - at, static_cast<off_t>(ref.offset + sizeof header + at)); };
    if (is_own && transfer_rest(static_cast<std::uint64_t>(got) - sizeof header, ref.size, read_rest) == 0) return true;
    out.clear();
    return false;
}

}  // namespace stepmill
