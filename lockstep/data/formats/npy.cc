// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/formats/readers.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <numeric>
#include <vector>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/data/formats/data_file.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

// The format (NEP 1): "\x93NUMPY", version 1.0 to 3.0, the length of a header, the header as a Python dictionary
// (descr, fortran_order, shape), then the values.
constexpr std::string_view kMagic("\x93NUMPY", 6);

DataError bad(const std::string& origin, const std::string& what) {
  return DataError({.what = concat("not a .npy array that can be read: ", what),
                    .here = origin,
                    .likely = "a damaged or cut file, or an array of Python objects",
                    .next = "save it again with numpy.save"});
}

// The text after `'key':` in the dictionary, without leading spaces.
std::string_view value_of(std::string_view header, std::string_view key, const std::string& origin) {
  const std::size_t at = header.find(concat('\'', key, '\''));
  const std::size_t colon = at == std::string_view::npos ? at : header.find(':', at);
  const std::size_t begin = colon == std::string_view::npos ? colon : header.find_first_not_of(' ', colon + 1);
  if (begin == std::string_view::npos) throw bad(origin, concat("its header has no ", key));
  return header.substr(begin);
}

torch::ScalarType dtype_of(std::string_view value, const std::string& origin) {
  static const std::map<std::string_view, torch::ScalarType> kTypes = {
      {"|b1", torch::kBool},  {"|u1", torch::kUInt8},   {"|i1", torch::kInt8},
      {"<i2", torch::kInt16}, {"<i4", torch::kInt32},   {"<i8", torch::kInt64},
      {"<f2", torch::kHalf},  {"<f4", torch::kFloat32}, {"<f8", torch::kFloat64}};
  const std::size_t end = value.size() > 1 && value[0] == '\'' ? value.find('\'', 1) : std::string_view::npos;
  if (end == std::string_view::npos) throw bad(origin, "it holds structures");
  const auto found = kTypes.find(value.substr(1, end - 1));
  if (found == kTypes.end())
    throw bad(origin, concat("dtype ", value.substr(0, end + 1),
                             "; bool, uint8, int8 to int64 and float16 to float64 in "
                             "little-endian order are read"));
  return found->second;
}

std::vector<std::int64_t> shape_of(std::string_view value, const std::string& origin) {
  const std::size_t end = value.find(')');
  if (value[0] != '(' || end == std::string_view::npos) throw bad(origin, "its shape is not a tuple");
  std::vector<std::int64_t> shape;
  for (const char* at = value.data() + 1; at < value.data() + end;) {
    std::int64_t size = 0;
    const auto [stop, error] = std::from_chars(at, value.data() + end, size);
    if (error != std::errc() || size < 0 || shape.size() == 16) throw bad(origin, "an impossible shape");
    shape.push_back(size);
    for (at = stop; at < value.data() + end && (*at == ',' || *at == ' ');) ++at;
  }
  return shape;
}

struct Header {
  torch::ScalarType dtype;
  bool fortran;
  std::vector<std::int64_t> shape;
  std::size_t bytes;  // of the header: what follows are the values
};

// `start` holds at least the header of a file of `all` bytes.
Header parse_header(std::span<const std::uint8_t> start, std::size_t all, const std::string& origin) {
  const std::string_view text(reinterpret_cast<const char*>(start.data()), start.size());
  if (text.size() < 12 || text.substr(0, 6) != kMagic) throw bad(origin, "no magic number");
  const std::uint8_t version = start[6];
  if (version < 1 || version > 3) throw bad(origin, concat("version ", int{version}));
  const std::size_t begin = version == 1 ? 10 : 12;
  std::size_t length = start[8] | std::size_t{start[9]} << 8;
  if (version > 1) length |= std::size_t{start[10]} << 16 | std::size_t{start[11]} << 24;
  if (length > text.size() - begin) throw bad(origin, "cut in its header");
  const std::string_view header = text.substr(begin, length);
  Header parsed{.dtype = dtype_of(value_of(header, "descr", origin), origin),
                .fortran = value_of(header, "fortran_order", origin).starts_with("True"),
                .shape = shape_of(value_of(header, "shape", origin), origin),
                .bytes = begin + length};
  const auto expected = product(parsed.shape, static_cast<std::int64_t>(c10::elementSize(parsed.dtype)));
  if (!expected) throw bad(origin, "its shape has more bytes than 64 bits can count");
  if (all - parsed.bytes != to_size(*expected))
    throw bad(origin, concat(*expected, " bytes promised, ", all - parsed.bytes, " found"));
  return parsed;
}

}  // namespace

// A bool that is neither 0 nor 1 is undefined behaviour: they are read as bytes. Where the first dimension varies fastest, the
// values are those of the transposed array in C order.
torch::Tensor read_npy(const std::filesystem::path& path) {
  constexpr std::size_t kLongestHeader = std::size_t{1} << 20;
  const DataFile file(path);
  std::vector<std::uint8_t> start(std::min<std::size_t>(file.size(), kLongestHeader));
  file.read(0, start);
  Header header = parse_header(start, file.size(), path.string());
  if (header.fortran) std::ranges::reverse(header.shape);
  const bool boolean = header.dtype == torch::kBool;
  torch::Tensor tensor = torch::empty(header.shape, boolean ? torch::kUInt8 : header.dtype);
  file.read(header.bytes, {static_cast<std::uint8_t*>(tensor.data_ptr()), tensor.nbytes()});
  if (boolean) tensor = tensor.ne(0);
  if (!header.fortran) return tensor;
  std::vector<std::int64_t> order(header.shape.size());
  std::iota(order.rbegin(), order.rend(), 0);
  return tensor.permute(order).contiguous();
}

}  // namespace lockstep
