// Caches the str objects of decoded dict keys.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace stepmill {

// Infos have the same keys in every step, so their str objects are cached, in a table with one entry per hash. A key that occurs a second
// time is interned: then a look-up by a literal compares pointers. A key that occurs once is not interned, since CPython 3.12 never frees
// interned strings.
// Guarded by the GIL. The cached references live as long as the process.
class KeyCache {
   public:
    // Returns a new reference to the str of these bytes, or null with an exception set.
    PyObject* get(const char* utf8, std::size_t size) {
        if (size > MAX_KEY_BYTES) return PyUnicode_DecodeUTF8(utf8, static_cast<Py_ssize_t>(size), "surrogatepass");
        Place& place = places_[hash(utf8, size) % places_.size()];
        if (place.key != nullptr && is_same(place.key, utf8, size)) {
            if (!place.is_interned) PyUnicode_InternInPlace(&place.key);
            place.is_interned = true;
            return Py_NewRef(place.key);
        }
        PyObject* key = PyUnicode_DecodeUTF8(utf8, static_cast<Py_ssize_t>(size), "surrogatepass");
        if (key != nullptr && PyUnicode_IS_COMPACT_ASCII(key)) {
            PyObject* old = place.key;
            place = Place{Py_NewRef(key), false};
            Py_XDECREF(old);
        }
        return key;
    }

   private:
    static constexpr std::size_t MAX_KEY_BYTES = 64;

    struct Place {
        PyObject* key;
        bool is_interned;
    };

    static std::size_t hash(const char* utf8, std::size_t size) {
        std::uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a
        for (std::size_t i = 0; i < size; ++i) hash = (hash ^ static_cast<std::uint8_t>(utf8[i])) * 0x100000001b3u;
        return static_cast<std::size_t>(hash ^ hash >> 32);
    }

    static bool is_same(PyObject* key, const char* utf8, std::size_t size) {
        return static_cast<std::size_t>(PyUnicode_GET_LENGTH(key)) == size && std::memcmp(PyUnicode_1BYTE_DATA(key), utf8, size) == 0;
    }

    std::array<Place, 1024> places_{};
};

}  // namespace stepmill
