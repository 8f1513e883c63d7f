// Values that do not fit in their row, in a memfd.
#include <cstdint>
#include <random>
#include <vector>

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.hpp"
#include "codec/overflow.hpp"

using namespace stepmill;

namespace {

using Bytes = std::vector<std::uint8_t>;

// Owns a memfd.
class File {
   public:
    File() : fd(memfd_create("stepmill-test", MFD_CLOEXEC)) { CHECK(fd >= 0); }
    ~File() { close(fd); }
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    std::uint64_t resident_bytes() const {
        struct stat file {};
        CHECK(fstat(fd, &file) == 0);
        return static_cast<std::uint64_t>(file.st_blocks) * 512;
    }

    const int fd;
};

Bytes make_value(std::size_t size, unsigned seed) {
    Bytes value(size);
    for (std::size_t i = 0; i < size; ++i) value[i] = static_cast<std::uint8_t>(seed + i * 31);
    return value;
}

OverflowRef write(OverflowWriter& writer, std::size_t server, const Bytes& value) {
    OverflowRef ref;
    CHECK(writer.write(server, value.data(), value.size(), ref) == 0);
    CHECK(ref.size == value.size() && ref.generation != 0);
    return ref;
}

Bytes read(const File& file, const OverflowRef& ref) {
    Bytes out;
    CHECK(read_overflow(file.fd, ref, out));
    return out;
}

void each_server_reads_back_its_last_value() {
    const File file;
    OverflowWriter writer(file.fd, 4);
    std::vector<Bytes> values(4);
    std::vector<OverflowRef> refs(4);
    std::mt19937 random(7);
    for (unsigned i = 0; i < 2000; ++i) {
        const std::size_t server = random() % 4;
        values[server] = make_value(random() % (i % 50 == 0 ? 300'000 : 9'000), i);
        refs[server] = write(writer, server, values[server]);
        for (std::size_t other = 0; other < 4; ++other) {
            if (refs[other].generation != 0) CHECK(read(file, refs[other]) == values[other]);
        }
    }
}

void an_empty_value_can_be_read_back() {
    const File file;
    OverflowWriter writer(file.fd, 1);
    CHECK(read(file, write(writer, 0, {})).empty());
}

void an_overwritten_value_is_not_mistaken_for_the_new_one() {
    const File file;
    OverflowWriter writer(file.fd, 1);
    const OverflowRef old = write(writer, 0, make_value(100, 1));
    write(writer, 0, make_value(100, 2));
    Bytes out;
    CHECK(!read_overflow(file.fd, old, out) && out.empty());
}

void an_outgrown_region_takes_no_memory() {
    const File file;
    OverflowWriter writer(file.fd, 1);
    std::size_t size = 10'000;
    for (; size < 20'000'000; size *= 2) write(writer, 0, make_value(size, 3));
    CHECK(writer.end_bytes() < 4 * size);
    CHECK(file.resident_bytes() <= size);
    write(writer, 0, make_value(100, 4));
    CHECK(file.resident_bytes() <= 4096);
}

void a_file_does_not_grow_when_values_do_not() {
    const File file;
    OverflowWriter writer(file.fd, 8);
    for (unsigned i = 0; i < 8; ++i) write(writer, i, make_value(5000, i));
    const std::uint64_t end_bytes = writer.end_bytes();
    for (unsigned i = 0; i < 10'000; ++i) write(writer, i % 8, make_value(5000, i));
    CHECK(writer.end_bytes() == end_bytes);
}

void a_second_writer_keeps_the_values_of_the_first() {
    const File file;
    OverflowWriter first(file.fd, 2);
    const Bytes value = make_value(7000, 5);
    const OverflowRef ref = write(first, 1, value);
    OverflowWriter second(file.fd, 2);
    write(second, 1, make_value(9000, 6));
    CHECK(read(file, ref) == value);
}

// A worker may have died while it wrote the words of the row.
void an_invalid_reference_is_refused_without_allocating() {
    const File file;
    OverflowWriter writer(file.fd, 1);
    const OverflowRef good = write(writer, 0, make_value(5000, 7));
    Bytes out;
    for (const std::uint64_t nonsense : {std::uint64_t{1}, std::uint64_t{4999}, std::uint64_t{1} << 20, std::uint64_t{1} << 62, UINT64_MAX, UINT64_MAX - 15}) {
        CHECK(!read_overflow(file.fd, {nonsense, good.size, good.generation}, out));
        CHECK(!read_overflow(file.fd, {good.offset, nonsense, good.generation}, out));
        CHECK(!read_overflow(file.fd, {nonsense, nonsense, 0}, out));
    }
    CHECK(out.capacity() < (std::size_t{1} << 20));
    CHECK(!read_overflow(-1, good, out));
}

void a_truncated_file_is_an_error_and_no_signal() {
    const File file;
    OverflowWriter writer(file.fd, 1);
    const OverflowRef ref = write(writer, 0, make_value(50'000, 8));
    CHECK(ftruncate(file.fd, 20'000) == 0);
    Bytes out;
    CHECK(!read_overflow(file.fd, ref, out) && out.empty());
}

void a_hole_contains_no_value() {
    const File file;
    OverflowWriter writer(file.fd, 1);
    OverflowRef ref = write(writer, 0, make_value(50'000, 8));
    const std::uint64_t huge = std::uint64_t{1} << 40;
    CHECK(ftruncate(file.fd, static_cast<off_t>(2 * huge)) == 0);
    CHECK(pwrite(file.fd, &huge, sizeof huge, static_cast<off_t>(ref.offset + 8)) == sizeof huge);
    ref.size = huge;
    Bytes out;
    CHECK(!read_overflow(file.fd, ref, out) && out.capacity() == 0);
}

void only_awaited_values_of_a_dead_writer_are_kept() {
    const File file;
    OverflowWriter writer(file.fd, 3);
    const Bytes value = make_value(300'000, 4);
    const OverflowRef first = write(writer, 0, make_value(300'000, 3));
    const OverflowRef kept = write(writer, 1, value);
    const OverflowRef last = write(writer, 2, make_value(300'000, 5));
    free_all_but(file.fd, {kept, {UINT64_MAX - 4, UINT64_MAX, 0}, {4096, UINT64_MAX, 0}});
    Bytes out;
    CHECK(read_overflow(file.fd, kept, out) && out == value);
    CHECK(!read_overflow(file.fd, first, out) && !read_overflow(file.fd, last, out));
    CHECK(file.resident_bytes() <= 310'000);
    free_all_but(file.fd, {});
    CHECK(file.resident_bytes() == 0);
}

void a_failed_write_is_reported() {
    OverflowWriter no_file(-1, 1);
    OverflowRef ref{1, 2, 3};
    const Bytes value = make_value(10, 9);
    CHECK(no_file.write(0, value.data(), value.size(), ref) == EBADF);
    CHECK(no_file.write(0, value.data(), UINT64_MAX, ref) == EFBIG);
    CHECK(ref.offset == 1 && ref.size == 2 && ref.generation == 3);
}

}  // namespace

int main() {
    return run_cases({
        {"each server reads back its last value", each_server_reads_back_its_last_value},
        {"an empty value can be read back", an_empty_value_can_be_read_back},
        {"an overwritten value is not mistaken for the new one", an_overwritten_value_is_not_mistaken_for_the_new_one},
        {"an outgrown region takes no memory", an_outgrown_region_takes_no_memory},
        {"a file does not grow when values do not", a_file_does_not_grow_when_values_do_not},
        {"a second writer keeps the values of the first", a_second_writer_keeps_the_values_of_the_first},
        {"an invalid reference is refused without allocating", an_invalid_reference_is_refused_without_allocating},
        {"a truncated file is an error and no signal", a_truncated_file_is_an_error_and_no_signal},
        {"a hole contains no value", a_hole_contains_no_value},
        {"only awaited values of a dead writer are kept", only_awaited_values_of_a_dead_writer_are_kept},
        {"a failed write is reported", a_failed_write_is_reported},
    });
}
