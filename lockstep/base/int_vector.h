// SPDX-License-Identifier: Apache-2.0
// base/int_vector.h: a vector that is indexed by int: one element per rank, device, stage or micro-batch.
//
// Ranks are ints, as in MPI and torch; std::vector wants unsigned indices. Checked in debug builds.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <vector>

#include "lockstep/base/to_size.h"

namespace lockstep {

template <class T>
class IntVector : public std::vector<T> {
  using Base = std::vector<T>;

 public:
  IntVector() = default;
  explicit IntVector(int size, const T& value = T()) : Base(to_size(size), value) {}
  IntVector(std::initializer_list<T> elements) : Base(elements) {}
  IntVector(Base elements) : Base(std::move(elements)) {}

  int size() const { return static_cast<int>(Base::size()); }
  decltype(auto) operator[](int index) { return Base::operator[](checked(index)); }
  decltype(auto) operator[](int index) const { return Base::operator[](checked(index)); }
  void assign(int size, const T& value) { Base::assign(to_size(size), value); }
  void resize(int size) { Base::resize(to_size(size)); }
  const Base& elements() const { return *this; }

 private:
  size_t checked([[maybe_unused]] int index) const {
    assert(index >= 0 && index < size());
    return to_size(index);
  }
};

// The place of a value; behind the last one, if it is not there.
template <class T>
int index_of(const std::vector<T>& values, const T& value) {
  return to_int(std::ranges::find(values, value) - values.begin());
}

}  // namespace lockstep
