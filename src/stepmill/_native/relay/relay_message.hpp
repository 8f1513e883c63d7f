// The layout of messages between a pool and its nodes: a header, then columns. For files that define NO_IMPORT_ARRAY.
#pragma once

#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "relay/relay.hpp"
#include "shared/tree.hpp"

namespace stepmill {

constexpr std::uint32_t MESSAGE_VERSION = 3 + STATISTICS_HASH;
constexpr std::size_t ALIGN_BYTES = 8;

// Places columns in a message one after another. Without a base it only computes the size.
struct Cursor {
    std::byte* base = nullptr;
    std::size_t limit = SIZE_MAX;
    std::size_t used = 0;

    template <typename Item>
    Item* take(std::size_t count) {
        used = (used + ALIGN_BYTES - 1) / ALIGN_BYTES * ALIGN_BYTES;
        Item* items = base == nullptr ? nullptr : reinterpret_cast<Item*>(base + used);
        used += sizeof(Item) * count;
        if (used > limit) throw std::invalid_argument("a message between a pool and its node is incomplete, or of another version of stepmill");
        return items;
    }
};

struct CommandHeader {
    std::uint32_t version, num, is_eager, is_hashing;
    std::uint64_t blob_bytes;
};

struct ResultHeader {
    std::uint32_t version, num, num_final, num_workers;
    std::uint64_t payload_bytes;
};

struct CommandColumns {
    std::uint32_t *server, *ticket;
    std::uint64_t *seed, *episode, *blob_bytes;
    std::uint8_t *command, *flags;
    std::vector<std::byte*> actions;
    std::uint8_t* blobs;

    CommandColumns(Cursor& cursor, const SlabPlan& plan, const CommandHeader& header)
        : server(cursor.take<std::uint32_t>(header.num)), ticket(cursor.take<std::uint32_t>(header.num)), seed(cursor.take<std::uint64_t>(header.num)),
          episode(cursor.take<std::uint64_t>(header.num)), blob_bytes(cursor.take<std::uint64_t>(header.num)), command(cursor.take<std::uint8_t>(header.num)),
          flags(cursor.take<std::uint8_t>(header.num)) {
        for (const Column& column : plan.action) actions.push_back(cursor.take<std::byte>(std::size_t{header.num} * plan.batch_size * column.row_bytes));
        blobs = cursor.take<std::uint8_t>(header.blob_bytes);
    }
};

// The columns of a result that are copied as they are, except observations.
inline std::vector<const Column*> outcome_columns(const SlabPlan& plan) {
    std::vector<const Column*> columns{&plan.outcome.reward, &plan.outcome.terminated, &plan.outcome.truncated, &plan.outcome.alive,
                                       &plan.outcome.episode_return, &plan.over, &plan.episode_length};
    for (const Column& column : plan.info) columns.push_back(&column);
    return columns;
}

// Returns a new message with this header, and its columns, which the caller writes.
template <typename Columns, typename Header>
std::pair<nb::object, Columns> new_message(const Header& header, const SlabPlan& plan) {
    Cursor measure;
    measure.take<Header>(1);
    Columns(measure, plan, header);
    nb::object message = new_column(static_cast<npy_intp>(measure.used), NPY_UINT8);
    Cursor cursor{data_of<std::byte>(message), measure.used};
    *cursor.take<Header>(1) = header;
    return {message, Columns(cursor, plan, header)};
}

// Returns the bytes of a message; copies them to `storage` if they are not aligned.
inline Cursor open_message(nb::handle message, std::vector<std::uint64_t>& storage) {
    if (!PyArray_Check(message.ptr())) throw std::invalid_argument("a message is an array of bytes");
    auto* array = reinterpret_cast<PyArrayObject*>(message.ptr());
    if (PyArray_TYPE(array) != NPY_UINT8 || !PyArray_IS_C_CONTIGUOUS(array)) throw std::invalid_argument("a message is a contiguous array of bytes");
    Cursor cursor;
    cursor.base = static_cast<std::byte*>(PyArray_DATA(array));
    cursor.limit = static_cast<std::size_t>(PyArray_SIZE(array));
    if (reinterpret_cast<std::uintptr_t>(cursor.base) % ALIGN_BYTES != 0) {
        storage.resize(cursor.limit / sizeof(std::uint64_t) + 1);
        std::memcpy(storage.data(), cursor.base, cursor.limit);
        cursor.base = reinterpret_cast<std::byte*>(storage.data());
    }
    return cursor;
}

template <typename Header>
const Header& read_header(Cursor& cursor) {
    const Header& header = *cursor.take<Header>(1);
    if (header.version != MESSAGE_VERSION) throw std::invalid_argument("the node runs another version of stepmill; install the same version on all machines");
    return header;
}

struct ResultColumns {
    RelayedWorker* workers;
    std::uint32_t *server, *ticket, *fault;
    std::uint64_t* payload_bytes;
    std::uint8_t* result;
    ObsHash* hash;
    std::vector<std::byte*> outcomes, observations, finals;
    std::uint8_t* payloads;

    ResultColumns(Cursor& cursor, const SlabPlan& plan, const ResultHeader& header)
        : workers(cursor.take<RelayedWorker>(header.num_workers)), server(cursor.take<std::uint32_t>(header.num)), ticket(cursor.take<std::uint32_t>(header.num)),
          fault(cursor.take<std::uint32_t>(header.num)), payload_bytes(cursor.take<std::uint64_t>(header.num)), result(cursor.take<std::uint8_t>(header.num)),
          hash(cursor.take<ObsHash>(header.num)) {
        const std::size_t k = plan.batch_size;
        for (const Column* column : outcome_columns(plan)) outcomes.push_back(cursor.take<std::byte>(header.num * k * column->row_bytes));
        for (const Column& column : plan.observation) observations.push_back(cursor.take<std::byte>(header.num * k * column.row_bytes));
        for (const Column& column : plan.final_observation) finals.push_back(cursor.take<std::byte>(header.num_final * k * column.row_bytes));
        payloads = cursor.take<std::uint8_t>(header.payload_bytes);
    }
};

}  // namespace stepmill
