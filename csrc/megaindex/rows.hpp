// Rows of a caller's two-dimensional array.
#pragma once

#include <cstdint>

namespace megaindex {

template <class T>
struct Rows {
  T* data;         // null if the caller wants none
  int64_t stride;  // elements from one row to the next

  T* operator[](int64_t k) const { return data == nullptr ? nullptr : data + k * stride; }
};

}  // namespace megaindex
