// Stands in for the header that only CUDA builds of torch generate; theirs is found first.
#pragma once
